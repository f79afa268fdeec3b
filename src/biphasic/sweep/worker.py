"""What runs in a sweep's worker processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace

from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.storage import store
from biphasic.sweep.grid import functions_of
from biphasic.sweep.records import Cell, Record, read_record, write_record


@dataclass(frozen=True)
class Job:
    """A trial for a worker."""

    trial: str
    cell: Cell
    config: FinetuneConfig
    bytes: int | None = None
    """Of a GPU's memory, about; None: not known, it gets one to itself."""
    attempt: int = 0


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a record, or with the worker's death (or a full GPU), which says nothing about the trial."""

    job: Job
    record: Record | None = None
    written: bool = True
    """Whether the record is where it belongs."""
    trained: bool = True
    """False: another driver's worker had written it before."""
    died: str | None = None
    """Why there is no record."""


@dataclass(frozen=True)
class Where:
    """A worker's machine, and its GPUs there."""

    node: str
    gpus: tuple[str, ...]


def failed(job: Job, error: BaseException | str, trace: str) -> Record:
    """The record of a trial that can't be run."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else ""
    line = (
        error if isinstance(error, str) else said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
    )
    about = {"traceback": trace, "attempt": job.attempt, "host": socket.gethostname()}
    return Record(job.trial, job.cell, "failed", error=line, about=about)


class Worker:
    """A process that runs one trial after another, as a Ray actor."""

    def __init__(self, module: str, output: str, threads: int, per_device: int):
        _die_with_parent()
        import torch

        torch.set_num_threads(threads)
        # The slow imports, once for all trials of this process.
        self._trials = functions_of(module)
        self._place, self._per_device = store(output), per_device
        # What was imported stays: without this, looking through all of it after each trial takes a third of a second.
        gc.collect()
        gc.freeze()

    def ready(self) -> Where:
        """Where this is."""
        import ray

        return Where(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def run(self, job: Job) -> Ended:
        """Train, score, and write the record; one that is there already stays."""
        begin = time.monotonic()
        try:
            if (before := self._done(job.trial)) is not None:
                return Ended(job, before, trained=False)
            outcome = self._trials.run_trial(job.config)
            about = {"attempt": job.attempt, "trials_on_device": self._per_device, **outcome.about}
            seconds = {"total": time.monotonic() - begin, **outcome.seconds}
            record = Record(job.trial, job.cell, "done", tuple(outcome.results), seconds=seconds, about=about)
            return self._written(job, record)
        except Exception as error:
            if _is_full(error) and self._per_device > 1:
                return Ended(job, died="its GPU was full")
            record = failed(job, error, traceback.format_exc())
            return self._written(job, replace(record, seconds={"total": time.monotonic() - begin}))
        finally:
            _tidy()

    def _done(self, trial: str) -> Record | None:
        try:
            found = read_record(self._place, trial)
        except (OSError, UserError):
            # Then it is written over: it would be the same.
            return None
        return found if found is not None and found.status == "done" else None

    def _written(self, job: Job, record: Record) -> Ended:
        if (before := self._done(job.trial)) is not None:
            return Ended(job, before, trained=False)
        try:
            write_record(self._place, record)
        except OSError:
            return Ended(job, record, written=False)
        return Ended(job, record)


def _die_with_parent() -> None:
    """Ray's own way takes seconds in which a trial could end and write its record, as if two had run."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _is_full(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError)


def _tidy() -> None:
    """What a trial held must be free for the next one, and for those beside it on a GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
