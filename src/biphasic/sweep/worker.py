"""Run trials in a sweep's worker processes."""

from __future__ import annotations

import gc
import socket
import time
import traceback
from dataclasses import dataclass, replace
from importlib import import_module

from biphasic.config.finetune import FinetuneConfig
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.sweep.records import Cell, TrialRecord, read_record, write_record


@dataclass(frozen=True)
class TrialJob:
    """A trial for a worker."""

    trial: str
    cell: Cell
    config: FinetuneConfig
    bytes: int | None = None
    """Estimated GPU memory in bytes. None if unknown; the trial then gets a GPU to itself."""
    attempt: int = 0


@dataclass(frozen=True)
class FinishedJob:
    """The outcome of a job: a record, or no record because the worker died or its GPU was full."""

    job: TrialJob
    record: TrialRecord | None = None
    written: bool = True
    """Whether the record was written to the output."""
    lost: str | None = None
    """Why there is no record."""


def failed_record(job: TrialJob, error: BaseException | str, trace: str) -> TrialRecord:
    """Return the record of a failed trial."""
    first_line = str(error).strip().partition("\n")[0]
    line = first_line if isinstance(error, (str, UserError)) else f"{type(error).__name__}: {first_line}"
    about = {"traceback": trace, "attempt": job.attempt, "host": socket.gethostname()}
    return TrialRecord(job.trial, job.cell, "failed", error=line, about=about)


class Worker:
    """Runs trials in a worker process, one at a time."""

    def __init__(self, module: str, output: str, threads: int, per_device: int):
        import torch

        torch.set_num_threads(threads)
        # Slow imports happen here, once for all trials of this process.
        self._functions = import_module(module)
        self._folder, self._per_device = open_store(output), per_device
        # Without freezing, garbage collection after each trial would spend a third of a second on the imported modules.
        gc.collect()
        gc.freeze()

    def run(self, job: TrialJob) -> FinishedJob:
        """Train, score and write the record. A trial whose record is `done` is not run again."""
        start = time.monotonic()
        try:
            # The record exists if a worker died after writing it, or if the driver was replaced.
            if (earlier := self._done(job.trial)) is not None:
                return FinishedJob(job, earlier)
            result = self._functions.run_trial(job.config)
            about = {"attempt": job.attempt, "trials_on_device": self._per_device, **result.about}
            seconds = {"total": time.monotonic() - start, **result.seconds}
            record = TrialRecord(job.trial, job.cell, "done", tuple(result.results), seconds=seconds, about=about)
        except Exception as error:
            if _is_out_of_gpu_memory(error) and self._per_device > 1:
                return FinishedJob(job, lost="its GPU was full")
            record = failed_record(job, error, traceback.format_exc())
            record = replace(record, seconds={"total": time.monotonic() - start})
        finally:
            _free_memory()
        try:
            write_record(self._folder, record)
        except OSError:
            return FinishedJob(job, record, written=False)
        return FinishedJob(job, record)

    def _done(self, trial: str) -> TrialRecord | None:
        try:
            record = read_record(self._folder, trial)
        except (OSError, UserError):
            # The trial runs again, and its record replaces the unreadable file.
            return None
        return record if record is not None and record.status == "done" else None


def _is_out_of_gpu_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError)


def _free_memory() -> None:
    """Free a trial's memory for the next trial and for other trials on the same GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
