"""Open a pretraining run: join the other ranks, lock its folder, find its checkpoint, and close it whatever happens."""

import faulthandler
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from composer import Trainer
from composer.core import Callback
from composer.utils import dist, reproducibility
from torch.distributed.checkpoint.api import CheckpointException

from biphasic.checkpointing.fetch import fetch_branch_point, find_resume_point, local_checkpoint
from biphasic.checkpointing.manifest import Manifest, batch_of
from biphasic.checkpointing.rank_group import RankGroup, require_node_folders
from biphasic.checkpointing.run_lock import ATTEMPTS, RunLock
from biphasic.checkpointing.save import RunSettings, Saver, progress_after_batch
from biphasic.checkpointing.start_rules import ResumeGuard, require_same
from biphasic.checkpointing.stopping import StopCoordinator
from biphasic.config.base import flatten
from biphasic.config.load import dump
from biphasic.data.loader_signals import end_loaders
from biphasic.data.shards import require_shards
from biphasic.data.streams import RowStream
from biphasic.devices import rank_device, require_precision
from biphasic.errors import Unavailable, UserError, first_line
from biphasic.model.checkpoint import require_safe_checkpoint
from biphasic.ranks import COLLECTIVE_SECONDS, INTERRUPTED_REASON, close_on_fault
from biphasic.storage import UNFINISHED_PREFIX, open_store, user_errors

_DOWNLOAD_TIMEOUT = timedelta(hours=2)
"""Long enough to download a large checkpoint from a slow bucket."""


class Run:
    """A run, from taking its lock (`start`) to releasing it (`close`).

    Attributes:
        checkpoint: local path of the checkpoint to load: the run's newest one, or another run's (`start_from`); None if the
            run starts with its initial weights.
        callbacks: callbacks that save checkpoints and stop the run.
    """

    def __init__(self, settings: RunSettings, guard: ResumeGuard):
        self._settings, self._guard, self._destination = settings, guard, settings.destination
        self._opened = time.monotonic()
        self._lock, self._ranks = RunLock(self._destination), RankGroup(_DOWNLOAD_TIMEOUT)
        self._stopping = StopCoordinator()
        self._stopping.install_handlers()
        self._resume: Manifest | None = None
        self._branch_point: tuple[str, Manifest] | None = None
        self._crash_file: CrashFile | None = None
        self._recorded: dict[str, Any] = {"name": settings.name, "indexes": {}, "overridden": []}
        """The entries of manifests that are the same for each checkpoint."""
        self._trainer: Trainer | None = None
        self.checkpoint: str | None = None
        self.callbacks: list[Callback] = []

    def start(self) -> None:
        """Lock the folder, find the checkpoint to start from, and build the callbacks. Raises the errors of `open_run`."""
        settings, guard, ranks, crashes = self._settings, self._guard, self._ranks, self._settings.folder / "crashes"
        self._require_same_on_nodes(dict(flatten(guard.config)), "give all nodes the same YAML and overrides")
        require_node_folders(self._destination, settings.streams, ranks)
        attempt, killed = ranks.on_first_rank(self._take_lock)
        # The files of all nodes say how a killed attempt's ranks ended. They are gathered at each start, so that no
        # rank creates its file while another one removes empty ones.
        lines = []
        if ranks.local_rank == 0:
            lines = read_crashes(crashes, killed["attempt"]) if killed is not None else []
            remove_empty_files(crashes)
        lines = list(dict.fromkeys(line for node in ranks.all_gather(lines) for line in node))
        if lines:
            self._lock.explain_killed(", ".join(lines))
        self._resume = find_resume_point(self._destination, settings.local_checkpoints, guard, ranks)
        self._lock.record_start(*((self._resume.batch, self._resume.run["tokens"]) if self._resume else (0, 0)))
        self._crash_file = CrashFile(crashes, attempt, ranks.rank)
        self.checkpoint = self._starting_checkpoint()
        # Rank 0's, because paths may differ between nodes, and the ranks' manifests are compared.
        self._recorded |= {"attempt": attempt, "config": ranks.broadcast(guard.config.model_dump(mode="json"))}
        settings.local_checkpoints.mkdir(parents=True, exist_ok=True)
        ranks.once_per_machine(self._remove_unfinished)
        self._saver = Saver(settings, self._lock, self._stopping, self._resume, self._recorded)
        # The saver comes first, because it may request a stop, to which the ranks then agree after the same batch.
        self.callbacks = [self._saver, self._stopping]
        if self._resume is None:
            self._write_config()
        dist.barrier()

    def close(self, reason: str) -> None:
        """Stop the callbacks' threads, restore the signal handlers, release the lock and record why the attempt ended."""
        if self._crash_file is None:
            reason = f"could not start: {reason}"
        elif reason == INTERRUPTED_REASON:
            batch = self._saver.newest_batch()
            reason += ", before the first checkpoint" if batch is None else f"; the newest checkpoint is of batch {batch}"
        if self._stopping.saved or reason != "finished":
            # First, because closing the loggers may take long, and a failing job has limited time.
            self._lock.record_reason(reason)
        end_loaders()
        if self._trainer is not None:
            # Not `trainer.close()`, because it waits for the other ranks, which wait for this rank's batch.
            self._trainer.engine.close()
        crashes = self._crash_file.remove() if self._crash_file is not None else []
        self._lock.release(": ".join([reason, *crashes]))
        # Last, because the launcher's SIGTERM after another rank's end would kill this process before it records the reason.
        self._stopping.restore_handlers(ended=self._stopping.saved or reason == "finished")

    @property
    def is_stopping(self) -> bool:
        """Whether the run stops after this batch."""
        return self._stopping.reason is not None

    @property
    def id(self) -> str | None:
        """Name of the run's first attempt, by which W&B and MLflow recognize a run that resumes; None if it isn't needed."""
        if not (self._ranks.is_first and self._settings.has_tracker):
            return None
        with user_errors(f"checkpoint.folder {self._destination}: can't be read"):
            return Path(min(open_store(self._destination).list(ATTEMPTS))).stem

    def say(self, text: str) -> None:
        """Print a line, with the run's name, on rank 0."""
        if self._ranks.is_first:
            print(f"{self._settings.name}: {text}", flush=True)

    def fetch_initial_weights(self, path: str) -> str:
        """Return the local path of `model.init_from`, after downloading it if it is in a bucket."""
        local_paths, folder = list[str](), self._settings.folder / "init"
        self._ranks.once_per_machine(lambda: local_paths.append(local_checkpoint(path, folder)))
        return self._ranks.broadcast(local_paths[0] if local_paths else None)

    def check_later_data(self, streams: Iterable[RowStream]) -> None:
        """Check all shards of data that later phases read, so that the run doesn't stop there. Raises a UserError."""
        self._ranks.on_first_rank(lambda: [require_shards(stream) for stream in streams])

    def check_rows(self, indexes: dict[str, str]) -> None:
        """Check that the run reads the rows that its checkpoint was trained on, and has the same past.

        `indexes` holds the hash of each training stream's index, by key. Raises a UserError if rows or configuration differ.
        """
        guard = self._guard
        self._require_same_on_nodes(indexes, "the rows are not the same")
        self._recorded["indexes"] = indexes
        if self._resume is not None:
            guard.require_same_past(self._resume, indexes)
            self._recorded["overridden"] = guard.overridden_keys(self._resume, indexes)
            self._write_config()
        elif self._branch_point is not None:
            guard.require_rows_of_branch_point(*self._branch_point, indexes)

    def train(self, trainer: Trainer) -> None:
        """Train to the end of the run. If it was stopped before or within a validation, validate first."""
        self._trainer, resume = trainer, self._resume
        batch, end = int(trainer.state.timestamp.batch), self._settings.max_duration
        length = f"of {int(end.value):,}" if end.unit == "ba" else f"(length: {end})"
        origin = f"starting at batch {batch:,} {length}"
        is_over = progress_after_batch(trainer.state).reached(end)
        repeats = resume is not None and "-validating" in resume.path and self._settings.validation_interval is not None
        if resume is not None:
            origin = f"resuming at batch {batch:,} {length} from {self.checkpoint}"
        self.say(f"{origin}, {time.monotonic() - self._opened:.1f} s")
        if repeats:
            self.say("repeating the validation in which the run was stopped")
            trainer.eval()
            self._saver.save_after_validation(trainer.state, trainer.logger)
            if is_over:
                self._saver.fit_end(trainer.state, trainer.logger)
        if is_over:
            self.say(f"already trained to {end}" + "; nothing to do" * (not repeats))
        else:
            trainer.fit()
        trainer.close()

    def _require_same_on_nodes(self, values: Mapping[str, Any], advice: str) -> None:
        ranks = self._ranks
        ranks.on_all_ranks(partial(require_same, ranks.broadcast(values), values, ranks.node, advice))

    def _take_lock(self) -> tuple[str, dict[str, Any] | None]:
        attempt = self._lock.acquire(self._ranks.size)
        open_store(self._destination).abort_uploads(lambda name: batch_of(name) is not None)
        return attempt, self._lock.killed

    def _remove_unfinished(self) -> None:
        """Remove what a save left that was killed. No other process writes checkpoints while this one holds the lock."""
        for path in self._settings.local_checkpoints.glob(f"{UNFINISHED_PREFIX}*-ba*"):
            with suppress(OSError):
                path.unlink()

    def _write_config(self) -> None:
        if self._ranks.is_first:
            open_store(str(self._settings.folder)).write("config.yaml", dump(self._guard.config).encode())

    def _starting_checkpoint(self) -> str | None:
        settings = self._settings
        if self._resume is not None:
            path = str(settings.local_checkpoints / self._resume.path)
        elif settings.start_from is not None:
            place, manifest, path = fetch_branch_point(settings.folder / "from", self._guard, self._ranks)
            self._branch_point = place, manifest
            self._lock.record_start(manifest.batch, manifest.run["tokens"])
            self.say(f"starts from batch {manifest.batch}, {place}")
        else:
            return None
        require_safe_checkpoint(path)
        return path


@contextmanager
def open_run(settings: RunSettings, guard: ResumeGuard) -> Iterator[Run]:
    """Open a run. On leaving the block, close it, release its lock and record why the attempt ended.

    Raises a UserError if the machine can't compute in the run's precision, another run holds the lock, or the
    checkpoint is missing, doesn't match or, in the block, can't be loaded.
    """
    require_precision(settings.precision)
    if settings.deterministic:
        reproducibility.configure_deterministic_mode()  # before CUDA is initialized
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    run = Run(settings, guard)
    with close_on_fault(run.close):
        run.start()
        reproducibility.seed_all(settings.seed)
        try:
            yield run
        except CheckpointException as error:  # a BaseException, of loading alone: `Saver` catches its own
            cause = next(iter(error.failures.values()))[0]
            kind = Unavailable if isinstance(cause, OSError) else UserError
            raise kind(f"checkpoint {run.checkpoint}: can't be loaded ({first_line(cause)})") from None
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            cause = " ".join(str(error).split())
            source = run.checkpoint or settings.init_from
            raise UserError(f"checkpoint {source}: can't be loaded ({cause:.300})") from None
    run.close("finished")


class CrashFile:
    """File to which Python writes the stacks of this rank's threads if SIGABRT, SIGSEGV or SIGBUS ends the process.

    NCCL's watchdog aborts the process after a collective's timeout, and about a minute after a rank on another node has
    ended. No exception is raised in Python, and rank 0, which records why an attempt ended, is aborted with the others.
    Nothing is written if Python's `faulthandler` is enabled already, such as by PYTHONFAULTHANDLER=1.
    """

    def __init__(self, folder: Path, attempt: str, rank: int):
        self._path, self._attempt = folder / f"{attempt}-rank{rank}.txt", attempt
        self._file: TextIO | None = None
        with suppress(OSError):  # such as a full disk, on which a run may still resume
            if not faulthandler.is_enabled():
                folder.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("w")
                faulthandler.enable(self._file)

    def remove(self) -> list[str]:
        """Remove the file at the end of the attempt, and return the other ranks' crashes (`read_crashes`)."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # if it is empty
        return read_crashes(self._path.parent, self._attempt)


def read_crashes(folder: Path, attempt: str) -> list[str]:
    """Return a line for each rank of an attempt that a signal ended, such as `rank 1: Aborted (FILE)`."""
    lines = []
    for path in _files(folder, f"{attempt}-rank*.txt"):
        with suppress(OSError):
            if message := path.read_text(errors="replace").partition("\n")[0]:
                rank = path.stem.rpartition("-rank")[2]
                lines.append(f"rank {rank}: {message.removeprefix('Fatal Python error: ')} ({path})")
    return lines


def remove_empty_files(folder: Path) -> None:
    """Remove the files of earlier attempts' ranks that ended in another way, such as by SIGKILL."""
    for path in _files(folder, "*-rank*.txt"):
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


def _files(folder: Path, pattern: str) -> list[Path]:
    with suppress(FileNotFoundError):  # another rank may remove the folder, once it is empty, while it is listed
        return sorted(folder.glob(pattern))
    return []
