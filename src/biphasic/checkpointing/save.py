"""Save checkpoints in background threads, so that training waits only while the state is copied to host memory."""

import copy
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from biphasic.amounts import format_bytes
from biphasic.checkpointing.manifest import Manifest, rank_manifest_name
from biphasic.checkpointing.rank_group import RankGroup
from biphasic.checkpointing.run_lock import RunLock
from biphasic.checkpointing.stopping import UPLOAD_TIMEOUT, StopCoordinator
from biphasic.checkpointing.upload import Uploader
from biphasic.data.streams import RowStream
from biphasic.durations import Duration, TrainingProgress
from biphasic.errors import Preempted, Unavailable, UserError, first_line
from biphasic.storage import atomic_path, file_hash, open_store

_LARGE = ("model", "optimizers")
_SMALLEST_PINNED = 1 << 20
"""Bytes from which pinning makes a copy faster."""
_QUIET_SECONDS = 5.0
"""Seconds that the last upload before a stop may take without a message."""


@dataclass(frozen=True)
class RunSettings:
    """What `Run` and `Saver` use of a run's configuration, besides what `ResumeGuard` compares.

    `folder` is the run's own. Checkpoints are saved to `destination`, a folder or bucket prefix, from `local_checkpoints`,
    which is the same folder if it is local: every `interval`, of which the newest `keep` remain (negative: all), and at
    `branch_points`, where other runs may start. `validation_interval` is None if the run doesn't validate. `start_from` and
    `init_from` are the places of another run's checkpoints and of the initial weights. `streams` are all that the run
    reads, by key. With `has_tracker`, W&B or MLflow asks for `Run.id`.
    """

    name: str
    folder: Path
    destination: str
    local_checkpoints: Path
    max_duration: Duration
    interval: Duration
    validation_interval: Duration | None
    keep: int
    branch_points: tuple[Duration, ...]
    start_from: str | None
    init_from: str | None
    streams: Mapping[str, RowStream]
    has_tracker: bool
    precision: str
    deterministic: bool
    seed: int


class ShardWriter(FileSystemWriter):
    """PyTorch's writer of sharded checkpoints, which here stores the folder as a string in the checkpoint's index.

    PyTorch pickles a `Path` object, whose class is in another module since Python 3.13, so 3.12 could not read it.
    """

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


class StagingBuffer:
    """Copies the training state to host memory, and reuses that memory for the next copy.

    With a GPU the memory is pinned, which makes the copy several times as fast. A sharded model's tensors aren't copied from
    a GPU, because Composer has already copied them to new host memory (`StateDictOptions.cpu_offload`). Only scalars are,
    since an optimizer may count its steps in host memory.
    """

    # PyTorch's `DefaultStager` does the same, but in 2.11 it closes itself after a copy, and a new one pins its memory anew.
    def __init__(self) -> None:
        self._buffers: dict[int, list[torch.Tensor]] = {}
        """Host memory by size in bytes."""

    def copy(self, content: dict[str, Any]) -> dict[str, Any]:
        """Copy a Composer checkpoint's content (`state` and `rng`). The next call overwrites the copy."""
        leaves = tree_leaves([content["state"].get(name) for name in _LARGE])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if torch.cuda.is_available() and all(tensor.device.type == "cpu" for tensor in tensors):
            copies = [tensor if tensor.dim() else tensor.clone() for tensor in tensors]
        else:
            copies = self._to_host(tensors)
        return copy.deepcopy(content, {id(tensor): copied for tensor, copied in zip(tensors, copies, strict=True)})

    def _to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in host memory; those of tensors that share memory share it too."""
        unused = {size: list(buffers) for size, buffers in self._buffers.items()}
        copied: dict[tuple[int, int], torch.UntypedStorage] = {}
        copies = []
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            source = local.untyped_storage()
            place = source.data_ptr(), source.nbytes()
            if place not in copied:
                buffers = unused.get(source.nbytes()) or [self._allocate(source.nbytes(), pinned=source.is_cuda)]
                copied[place] = buffers.pop(0).untyped_storage().copy_(source, non_blocking=False)
            result = torch.empty(0, dtype=local.dtype).set_(
                copied[place], local.storage_offset(), local.size(), local.stride()
            )
            if isinstance(tensor, DTensor):
                parts = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
                result = DTensor.from_local(result, tensor.device_mesh, tensor.placements, **parts)
            copies.append(result)
        return copies

    def _allocate(self, size: int, pinned: bool) -> torch.Tensor:
        # Registered and not allocated as pinned, since PyTorch's allocator rounds each size up to a power of two.
        buffer = torch.empty(size, dtype=torch.uint8)
        if pinned and size >= _SMALLEST_PINNED:
            cuda: Any = torch.cuda.cudart()
            error = int(cuda.cudaHostRegister(buffer.data_ptr(), size, 0))
            if error:
                raise UserError(
                    f"checkpoint: {format_bytes(size)} of host memory for the copy of the training state can't be pinned "
                    f"(cudaHostRegister: error {error}): free host memory, or set parallelism.strategy: fsdp, which copies "
                    "without it"
                )
            weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr()).atexit = False
        self._buffers.setdefault(size, []).append(buffer)
        return buffer


class Saver(Callback):
    """Callback that saves checkpoints to a local folder and uploads them to the run's destination, such as a bucket.

    Checkpoints have Composer's names and content, so any Composer Trainer can load them. One thread writes the copied
    state to disk, using a separate process group if it is sharded, and another one uploads the files. `resume` is the
    manifest of the checkpoint that the run resumed from; `recorded` are the `run` entries that all manifests share.
    """

    def __init__(
        self,
        settings: RunSettings,
        lock: RunLock,
        stopping: StopCoordinator,
        resume: Manifest | None,
        recorded: dict[str, Any],
    ):
        self._lock, self._stopping, self._resume, self._recorded = lock, stopping, resume, recorded
        self._local_folder, self._destination = settings.local_checkpoints, settings.destination
        self._at_interval = interval_schedule(settings.interval, settings.max_duration)
        self._validates = interval_schedule(settings.validation_interval, settings.max_duration)
        self._branch_points = settings.branch_points
        self._ranks = RankGroup()
        # PyTorch's writer synchronizes with the thread's current GPU. By default that is GPU 0, where each rank would
        # create a context of half a gigabyte.
        use_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer", initializer=use_gpu)
        self._writing: Future[None] | None = None
        self._fault: str | None = None
        self._saved_batch = self._written_batch = None if resume is None else resume.batch
        self._buffer = StagingBuffer()
        self._uploader = Uploader(
            self._local_folder,
            self._destination,
            settings.keep,
            self._ranks.rank,
            self._ranks.local_ranks,
            self._saved_batch or 0,
            self._branch_points,
        )

    def newest_batch(self) -> int | None:
        """Return the batch of the newest checkpoint that is complete on the disk, after waiting for one being written."""
        if self._writing is not None:
            wait([self._writing], _QUIET_SECONDS)
        return self._written_batch

    def batch_end(self, state: State, logger: Logger) -> None:
        self._lock.record_progress(int(state.timestamp.batch), int(state.timestamp.token))
        if (fault := self._lock.lost or self._fault) is not None:
            self._stopping.stop_for_fault(fault)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        # A run that stops after this batch hasn't validated: the next start does so, and saves again.
        validating = self._stopping.reason is not None and self._validates(state)
        if self._at_interval(state) or self._is_branch_point(state):
            self._save_once(state, logger, validating)
        self._stop_if_requested(state, logger, validating)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self._stop_if_requested(state, logger, validating=True)

    def save_after_validation(self, state: State, logger: Logger) -> None:
        """Replace a checkpoint that was saved within a validation, after repeating the validation."""
        assert self._resume is not None
        self._save(state, logger, self._resume.run["kept"])

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until all ranks have uploaded the last checkpoint. Raises a UserError if one can't be written or uploaded."""
        self._stopping.ranks.on_all_ranks(self._finish)

    def close(self, state: State, logger: Logger) -> None:
        # Don't wait for a write, because it may be waiting for a rank that has exited.
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._uploader.close()

    def _save_once(self, state: State, logger: Logger, validating: bool) -> None:
        if self._saved_batch != int(state.timestamp.batch):
            self._save(state, logger, self._is_branch_point(state), validating)

    def _is_branch_point(self, state: State) -> bool:
        """Return whether the last batch reached a point where other runs may start."""
        if state.previous_timestamp is None:
            return False
        before, now = TrainingProgress.of(state.previous_timestamp), progress_after_batch(state)
        return any(now.reached(point) and not before.reached(point) for point in self._branch_points)

    def _stop_if_requested(self, state: State, logger: Logger, validating: bool) -> None:
        stopping = self._stopping
        if stopping.reason is None:
            return
        if stopping.is_fault:
            self._wait_for_writer()
            raise UserError(stopping.reason)
        self._save_once(state, logger, validating)
        stopping.ranks.on_all_ranks(partial(self._require_written, f"{stopping.reason}: not saved: "))
        # The machine may be switched off before the last upload ends.
        if not self._uploader.wait(_QUIET_SECONDS):
            pending = ", ".join(f"{part.path} ({format_bytes(part.size)})" for part in self._uploader.pending)
            print(
                f"{stopping.reason}: saved on this machine, but not yet in {self._destination}: {pending}; "
                f"waiting up to {UPLOAD_TIMEOUT.total_seconds():.0f} s",
                flush=True,
            )
        result = "saved"
        try:
            self._finish()
        except UserError as error:
            result = f"saved on this machine only ({error})"
        stopping.saved = True
        seconds = stopping.seconds_since_request()
        reason = f"{stopping.reason}: {result} at batch {self._saved_batch}, {seconds:.1f} s after the request"
        self._lock.release(reason)
        stopping.ranks.barrier()
        raise Preempted(reason)

    def _wait_for_writer(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _require_written(self, context: str = "") -> None:
        self._wait_for_writer()
        if self._fault is not None:
            raise UserError(f"{context}{self._fault}")

    def _finish(self) -> None:
        self._require_written()
        if not self._uploader.wait(UPLOAD_TIMEOUT.total_seconds()):
            paths = [manifest.path for manifest in self._uploader.pending]
            raise Unavailable(
                f"checkpoint.folder: can't be written; not yet uploaded: {', '.join(paths)} (in {self._local_folder}). "
                "Start again on this machine when the folder can be reached: these checkpoints are uploaded first"
            )

    def _save(self, state: State, logger: Logger, kept: bool, validating: bool = False) -> None:
        start = time.perf_counter()
        self._wait_for_writer()
        waited = time.perf_counter() - start
        batch = self._saved_batch = int(state.timestamp.batch)
        sharded = state.fsdp_sharded_state_dict_enabled
        content = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
        if not self._ranks.is_first:
            content.pop("rng")
        name = f"ba{batch}-validating" if validating else f"ba{batch}"
        path = f"ep{int(state.timestamp.epoch)}-{name}" if sharded else f"{name}-rank0.pt"
        run = {**self._describe(state), "kept": kept, "writers": self._ranks.size if sharded else 1}
        if sharded or self._ranks.is_first:
            self._writing = self._writer.submit(self._write, self._buffer.copy(content), Manifest(batch, path, {}, run))
        blocked = time.perf_counter() - start
        logger.log_metrics({"checkpoint/blocked_seconds": blocked, "checkpoint/waited_seconds": waited})

    def _describe(self, state: State) -> dict[str, object]:
        # The algorithm that knows the phase of the last batch, and when that batch began.
        tracker: Any = next(algorithm for algorithm in state.algorithms if hasattr(algorithm, "phase_name"))
        return {
            **self._recorded,
            "phase": tracker.phase_name,
            "tokens": int(state.timestamp.token),
            "rows": int(state.timestamp.sample),
            "epochs": progress_after_batch(state).epochs,
            "last_batch": list(astuple(tracker.last_batch)),
            "ranks": self._ranks.size,
        }

    def _write(self, content: dict[str, Any], manifest: Manifest) -> None:
        """Write this rank's files and queue them for upload. Runs in the writer's thread."""
        write = self._write_monolithic if manifest.path.endswith(".pt") else self._write_sharded
        try:
            files = {
                path.relative_to(self._local_folder).as_posix(): (path.stat().st_size, file_hash(path))
                for path in write(content, self._local_folder / manifest.path)
            }
            manifest = replace(manifest, files=files)
            name = rank_manifest_name(manifest.batch, self._ranks.rank)
            open_store(str(self._local_folder)).write(name, manifest.to_bytes())
            self._written_batch = manifest.batch
        except (OSError, RuntimeError, CheckpointException) as error:
            cause = first_line(_cause(error))
            self._fault = (
                f"checkpoint {manifest.path} can't be written to {self._local_folder} ({cause}): free space, "
                "or correct what the message names, and start again: the run resumes from the checkpoint before it"
            )
            return
        self._uploader.add(manifest)

    def _write_monolithic(self, content: dict[str, Any], path: Path) -> list[Path]:
        # Through a file object, since PyTorch's own writer hides why a write failed.
        with atomic_path(path) as partial, partial.open("wb") as file:
            torch.save(content, file)
            # As `ShardWriter` does: the manifest must not be on the disk before the checkpoint.
            file.flush()
            os.fsync(file.fileno())
        return [path]

    def _write_sharded(self, content: dict[str, Any], folder: Path) -> list[Path]:
        if folder.is_symlink():
            raise OSError(f"{folder} is a link")
        files = f"__{self._ranks.rank}_*.distcp"
        for old in folder.glob(files):
            old.unlink()
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save_shards(content, storage_writer=ShardWriter(folder), planner=planner, process_group=self._ranks.group)
        shards, index = list(folder.glob(files)), folder / ".metadata"
        if not self._ranks.is_first:
            return shards
        with index.open("rb") as file:
            os.fsync(file.fileno())  # torch 2.11 does so before Python has written all of its buffer
        return [*shards, index]


def _cause(error: BaseException) -> BaseException:
    """Return the operating system's error behind PyTorch's, if there is one."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def interval_schedule(interval: Duration | None, end: Duration) -> Callable[[State], bool]:
    """Return a function of Composer's state: whether an interval, or the run (`end`), has ended with the last batch.

    It is never so without an interval. Composer's own scheduler rounds shares of a run in another way than `--plan`, and
    takes none if phases' data differ.
    """
    if interval is None:
        return lambda state: False
    every = interval.resolve(end)

    def is_due(state: State) -> bool:
        if state.previous_timestamp is None:
            return False
        before, now = TrainingProgress.of(state.previous_timestamp), progress_after_batch(state)
        passed = now.in_unit(every.unit) // every.value > before.in_unit(every.unit) // every.value
        return passed or now.reached(end)

    return is_due


def progress_after_batch(state: State) -> TrainingProgress:
    """Return the counts after the last batch. Composer counts an epoch only after the checkpoint of its last batch."""
    now = TrainingProgress.of(state.timestamp)
    # Not `state.dataloader`, which is the validation's while it runs.
    batches: Any = state.train_dataloader
    return replace(now, epochs=batches.ended_epochs(now.batches))
