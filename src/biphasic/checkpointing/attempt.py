"""One start of a run: its hold on the folder, where it goes on from, and what may end it early."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from composer.utils import dist

from biphasic.checkpointing.claim import Claim
from biphasic.checkpointing.find import resume_point
from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.stopping import Stopping
from biphasic.checkpointing.together import Together
from biphasic.config.errors import UserError
from biphasic.faults import closing

_PATIENCE = timedelta(hours=2)
"""For a large checkpoint and a slow bucket."""


@dataclass
class Attempt:
    """`name` is the same on all ranks; `here` is this machine's folder of checkpoints, `place` where the run saves;
    `resume` is the checkpoint that it goes on from."""

    name: str
    place: str
    here: Path
    claim: Claim
    stopping: Stopping
    ranks: Together
    resume: Manifest | None

    def end(self, reason: str) -> None:
        """Let the folder and the signals go, and remember why."""
        self.stopping.release()
        self.claim.release(reason)


def begin(place: str, here: Path, run: dict[str, Any]) -> Attempt:
    """Claim the folder for this run, listen for signals, and find the newest complete checkpoint of `run`.

    Raises:
        UserError: another run holds the folder, or it can't be read or written to.
    """
    stopping, claim, ranks = Stopping(), Claim(place), Together(_PATIENCE)
    stopping.listen()

    def close(reason: str) -> None:
        stopping.release()
        claim.release(f"could not start: {reason}")

    name, fault = "", None
    with closing(close):
        if dist.get_global_rank() == 0:
            try:
                name = claim.take(dist.get_world_size())
            except UserError as error:
                fault = str(error)
        ranks.raise_first(fault)
        name = ranks.first(name)
        resume = resume_point(place, here, run, ranks)
    if dist.get_global_rank() == 0:
        claim.starts_from(resume.batch if resume else 0, resume.run["tokens"] if resume else 0)
    return Attempt(name, place, here, claim, stopping, ranks, resume)
