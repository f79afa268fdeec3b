"""Saving: the state is copied off the device while training waits; everything else happens in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from biphasic.checkpointing.claim import Claim
from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.staging import Staging
from biphasic.checkpointing.stopping import Stopping
from biphasic.checkpointing.together import Together
from biphasic.checkpointing.uploads import Uploads, write_part
from biphasic.config.errors import Preempted, UserError
from biphasic.storage import hash_of, short, unfinished

FILENAME = "ba{batch}-rank0.pt"
"""Name of a monolithic checkpoint; a sharded one is a folder, `ep…-ba…`."""


class ShardWriter(FileSystemWriter):
    """PyTorch's writer of sharded checkpoints, with the folder as text in their index.

    PyTorch pickles a path, whose class has another module in Python 3.13 than in 3.12 and 3.14: none could read the others'.
    """

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return str(self.path)


class Saver(Callback):
    """Saves to a folder of this machine, and completes each checkpoint where the run saves, which may be a bucket.

    Checkpoints are Composer's own, in content and in names, and so can be loaded by any Composer Trainer. Training waits
    while the state is copied to host memory. A thread then writes it to the disk, with collectives of its own where it
    is sharded, and another one stores it (`biphasic.checkpointing.uploads`). A checkpoint is complete with its manifest.

    Args:
        here: a folder on this machine.
        uploads: takes each checkpoint from there.
        due: whether to save now, and whether that checkpoint is one to keep; see `biphasic.training.moments`.
        describe: what the manifest says of the run at this moment.
        patience: seconds to wait, at the end of the training, for a place that can't be reached.
        stopping: what ends the run early.
        claim: the run's hold on its folder.
    """

    def __init__(
        self,
        here: Path,
        uploads: Uploads,
        due: Callable[[State, Event], tuple[bool, bool]],
        describe: Callable[[State], dict[str, Any]],
        patience: float,
        stopping: Stopping,
        claim: Claim,
    ):
        self._here, self._uploads, self._due, self._describe = here, uploads, due, describe
        self._patience, self._stopping, self._claim = patience, stopping, claim
        self._group = Together().group
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._writing: Future[None] | None = None
        self._saved: int | None = None
        self._staging = Staging()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Let the claim know how far the run is."""
        self._claim.reached(int(state.timestamp.batch), int(state.timestamp.token))
        if (fault := self._claim.lost or self._uploads.fault) is not None:
            self._stopping.fault(fault)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time; stop if it was agreed on."""
        self._save_if_due(state, logger, Event.BATCH_CHECKPOINT)
        self._stop_if_asked(state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an epoch's end is the time."""
        self._save_if_due(state, logger, Event.EPOCH_CHECKPOINT)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Stop within a validation, too."""
        self._stop_if_asked(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            UserError: it can't be stored; it stays on this machine.
        """
        self._finish()

    def close(self, state: State, logger: Logger) -> None:
        """End the threads."""
        # A writer that waits for a rank that is gone would never end.
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._uploads.close()

    def _save_if_due(self, state: State, logger: Logger, event: Event) -> None:
        now, kept = self._due(state, event)
        if (now or kept) and self._saved != int(state.timestamp.batch):
            self._save(state, logger, kept)

    def _stop_if_asked(self, state: State, logger: Logger) -> None:
        stopping = self._stopping
        if stopping.asked is None:
            return
        if stopping.broken:
            if self._writing is not None:
                self._writing.result()
            stopping.require_sound()
        if self._saved != int(state.timestamp.batch):
            self._save(state, logger, kept=False)
        said = "saved"
        try:
            self._finish()
        except UserError as error:
            said = f"saved on this machine only ({error})"
        stopping.saved = True
        reason = f"{stopping.asked}: {said} at batch {self._saved}, {stopping.seconds():.1f} s after it"
        self._claim.release(reason)
        stopping.together()
        raise Preempted(reason)

    def _finish(self) -> None:
        if self._writing is not None:
            self._writing.result()
        if self._uploads.fault is not None:
            raise UserError(self._uploads.fault)
        if not self._uploads.drain(self._patience):
            raise UserError(
                f"checkpoint.folder: can't be written ({', '.join(self._uploads.waiting())} stayed in {self._here}): start "
                "again on this machine when it can be reached, and they are stored first"
            )

    def _save(self, state: State, logger: Logger, kept: bool) -> None:
        start = time.perf_counter()
        if self._writing is not None:
            self._writing.result()
        waited = time.perf_counter() - start
        self._saved = int(state.timestamp.batch)
        sharded, rank = state.fsdp_sharded_state_dict_enabled, dist.get_global_rank()
        content = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
        if sharded and rank:
            content.pop("rng")
        path = f"ep{int(state.timestamp.epoch)}-ba{self._saved}" if sharded else FILENAME.format(batch=self._saved)
        about = {**self._describe(state), "kept": kept, "parts": dist.get_world_size() if sharded else 1}
        if sharded or rank == 0:
            mine = Manifest(self._saved, path, {}, about)
            write = self._write_sharded if sharded else self._write_whole
            self._writing = self._writer.submit(self._write, write, self._staging.copy(content), mine)
        blocked = time.perf_counter() - start
        logger.log_metrics({"checkpoint/blocked_seconds": blocked, "checkpoint/waited_seconds": waited})

    def _write(
        self, write: Callable[[dict[str, Any], Path], list[Path]], content: dict[str, Any], mine: Manifest
    ) -> None:
        """On the writer's thread."""
        try:
            written = write(content, self._here / mine.path)
            files = {file.relative_to(self._here).as_posix(): (file.stat().st_size, hash_of(file)) for file in written}
            whole = Manifest(mine.batch, mine.path, files, mine.run)
            write_part(whole, self._here)
        except (OSError, RuntimeError, CheckpointException) as error:
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            self._uploads.fault = (
                f"checkpoint {mine.path} can't be written to {self._here} ({short(cause)}): make room, or mend what it "
                "says, and start again: the run goes on from the checkpoint before it"
            )
            return
        self._uploads.add(whole)

    def _write_whole(self, content: dict[str, Any], path: Path) -> list[Path]:
        with unfinished(path) as partial:
            torch.save(content, partial)
        return [path]

    def _write_sharded(self, content: dict[str, Any], folder: Path) -> list[Path]:
        rank = dist.get_global_rank()
        for old in folder.glob(f"__{rank}_*.distcp"):
            old.unlink()
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save_shards(content, storage_writer=ShardWriter(folder), planner=planner, process_group=self._group)
        return [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]
