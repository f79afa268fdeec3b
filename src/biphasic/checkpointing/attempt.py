"""Start a run: install signal handlers, take its lock and find the checkpoint that it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from biphasic.checkpointing.crash_file import CrashFile, read_crashes, remove_empty_files
from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.resume import find_resume_point
from biphasic.checkpointing.run_lock import RunLock
from biphasic.checkpointing.stopping import ProcessGroup, StopCoordinator
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import UserError
from biphasic.faults import close_on_fault

_DOWNLOAD_TIMEOUT = timedelta(hours=2)
"""Long enough to download a large checkpoint from a slow bucket."""


@dataclass
class Attempt:
    """One start of a run, with its destination, its lock and the checkpoint that it resumes from.

    `name` is the same on all ranks. Rank 0 holds `lock`. `local_folder` is this node's folder of checkpoints.
    """

    name: str
    destination: str
    local_folder: Path
    lock: RunLock
    stopping: StopCoordinator
    ranks: ProcessGroup
    resume: Manifest | None
    crash_file: CrashFile

    def end(self, reason: str) -> None:
        """Restore the signal handlers, release the lock and record why the attempt ended."""
        self.stopping.restore_handlers()
        self.lock.release(": ".join([reason, *self.crash_file.remove()]))


def start_attempt(config: PretrainConfig) -> Attempt:
    """Install signal handlers, lock the folder, and find the newest complete checkpoint of the run.

    Args:
        config: the run's configuration.

    Raises:
        UserError: another run holds the lock, or the folder can't be read or written.
    """
    destination, local_folder = config.checkpoint_destination, config.local_checkpoints
    lock, ranks = RunLock(destination), ProcessGroup(_DOWNLOAD_TIMEOUT)
    stopping = StopCoordinator(config.checkpoint.upload_timeout)
    stopping.install_handlers()

    def close(reason: str) -> None:
        stopping.restore_handlers()
        lock.release(f"could not start: {reason}")

    name, fault = "", None
    with close_on_fault(close):
        if ranks.rank == 0:
            try:
                name = lock.acquire(ranks.size)
            except UserError as error:
                fault = error
        ranks.raise_first(fault)
        name, killed = ranks.broadcast((name, lock.killed))
        crashes = config.run_folder / "crashes"
        _explain_killed(killed, crashes, lock, ranks)
        resume = find_resume_point(destination, local_folder, config, ranks)
    if ranks.rank == 0:
        lock.record_start(resume.batch if resume else 0, resume.run["tokens"] if resume else 0)
    return Attempt(name, destination, local_folder, lock, stopping, ranks, resume, CrashFile(crashes, name, ranks.rank))


def _explain_killed(killed: str | None, crashes: Path, lock: RunLock, ranks: ProcessGroup) -> None:
    """Record how the previous attempt's ranks ended if it was killed, from the files of all nodes."""
    lines = []
    if ranks.local_rank == 0:
        lines = read_crashes(crashes, killed) if killed is not None else []
        remove_empty_files(crashes)
    # Also without a killed attempt, so that no rank creates its file while another one removes empty ones.
    lines = list(dict.fromkeys(line for node in ranks.all_gather(lines) for line in node))
    if lines and ranks.rank == 0:
        lock.explain_killed(", ".join(lines))
