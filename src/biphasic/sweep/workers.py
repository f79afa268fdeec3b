"""Run a sweep's trials in worker processes: one for each concurrent trial, reused for later trials.

A worker writes the records of its trials, so no finished trial is lost if the driver dies. Workers are killed when the
driver dies, so that they never train at the same time as a restarted sweep.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepCluster
from biphasic.devices import is_out_of_memory
from biphasic.errors import UserError, first_line
from biphasic.storage import open_store
from biphasic.sweep.grid import TRIAL_MODULE, encoder_folder
from biphasic.sweep.records import PREDICTIONS_FOLDER, Cell, TrialRecord, read_record, write_record
from biphasic.workers import open_workers as open_group
from biphasic.workers.group import EndedJob, Slot, UnusableWorker, WorkerGroup

_USABLE = 0.9
"""Share of a GPU's memory that the estimates of its trials may add up to."""
_CONTEXT_BYTES = 600 * 2**20
"""GPU memory of the CUDA context and kernels in each process, in bytes."""
_TRIAL_IMPORTS = ("composer", "biphasic.finetuning.trainer", "biphasic.export.finetuned")
"""Modules that fine-tuning imports lazily."""


@dataclass(frozen=True)
class TrialJob:
    """A trial for a worker."""

    trial: str
    cell: Cell
    config: FinetuneConfig
    bytes: int | None = None
    """Estimated GPU memory in bytes. None: unknown, so that the trial gets a GPU to itself."""
    attempt: int = 0
    source: str | None = None
    """The trial whose encoder it starts from, if that is another task's."""
    keep: bool = False
    """Whether to train a recorded trial again, only to keep its encoder."""


@dataclass(frozen=True)
class FinishedJob:
    """The outcome of a job: a record, or none if the worker died or its GPU was full."""

    job: TrialJob
    record: TrialRecord | None = None
    written: bool = True
    """Whether the record was written to the output."""
    lost: str | None = None
    """Why another worker may run the job."""
    is_broken: bool = False
    """Whether the worker can't run another trial."""


def failed_record(job: TrialJob, error: BaseException | str, trace: str) -> TrialRecord:
    """Return the record of a failed trial."""
    line = str(error).strip().partition("\n")[0]
    line = line if isinstance(error, (str, UserError)) else f"{type(error).__name__}: {line}"
    about = {"traceback": trace, "attempt": job.attempt, "host": socket.gethostname()}
    return TrialRecord(job.trial, job.cell, "failed", error=line, about=about)


class Worker:
    """Runs trials in a worker process, one at a time."""

    def __init__(self, module: str, output: str, threads: int, per_device: int):
        import torch

        torch.set_num_threads(threads)
        # Slow imports happen here, once for all trials of this process.
        self._functions = import_module(module)
        self._output, self._folder, self._per_device = output, open_store(output), per_device
        if (fault := _gpu_fault()) is not None:
            place = f"{socket.gethostname()}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
            raise UnusableWorker(f"{place}: {fault} (CUDA_VISIBLE_DEVICES= runs trials on CPUs)")
        # Otherwise each trial's garbage collection would spend a third of a second on the imported modules.
        gc.collect()
        gc.freeze()

    def run(self, job: TrialJob) -> FinishedJob:
        """Train, score and write the record. A trial whose record is `done` isn't run again, except to keep its encoder."""
        import torch

        finished = self._run(job)
        # Free the trial's memory for the next trial and for other trials on the same GPU.
        gc.collect()
        if _gpu_fault() is not None:  # after most errors of a GPU, all further calls of the process fail
            return replace(finished, is_broken=True)
        torch.cuda.empty_cache()
        return finished

    def _run(self, job: TrialJob) -> FinishedJob:
        start = time.monotonic()
        try:
            if job.keep:
                self._functions.keep_encoder(job.config, encoder_folder(self._output, job.trial))
                return FinishedJob(job, TrialRecord(job.trial, job.cell, "done"))
            # A record exists if a worker died after writing it, or if another driver replaced this one. If its file can't
            # be read, the trial runs again, and its record replaces the file.
            with suppress(OSError, UserError):
                earlier = read_record(self._folder, job.trial)
                if earlier is not None and earlier.status == "done" and earlier.about.get("encoder_from") == job.source:
                    return FinishedJob(job, earlier)
            result = self._functions.run_trial(job.config)
            about = {"attempt": job.attempt, "trials_on_device": self._per_device, "encoder_from": job.source}
            about |= result.about
            seconds = {"total": time.monotonic() - start, **result.seconds}
            record = TrialRecord(job.trial, job.cell, "done", tuple(result.results), seconds=seconds, about=about)
            files = {f"{PREDICTIONS_FOLDER}/{job.trial}/{name}": file for name, file in result.predictions.items()}
        except Exception as error:
            if is_out_of_memory(error) and self._per_device > 1:
                return FinishedJob(job, lost="its GPU was full")
            record = failed_record(job, error, traceback.format_exc())
            record = replace(record, seconds={"total": time.monotonic() - start})
            files = {}
            if _gpu_fault() is not None:
                return FinishedJob(job, record, False, f"its GPU failed ({first_line(error)})", is_broken=True)
        if job.keep:
            return FinishedJob(job, record)
        try:
            for name, content in files.items():
                self._folder.write(name, content)
            write_record(self._folder, record)
        except OSError:
            return FinishedJob(job, record, written=False)
        return FinishedJob(job, record)


def _gpu_fault() -> str | None:
    """Return why this process can't use its GPU; None if it can, or has none."""
    import torch

    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return first_line(error)
    return None


@dataclass(frozen=True)
class Layout:
    """How many trials run at a time, and how they share devices."""

    slots: int
    per_device: int
    """Number of concurrent trials on a GPU, or in total if there are no GPUs."""
    share_of_gpu: float = 0.0
    gpu_bytes: int | None = None
    """Memory of each GPU in bytes; None if there are no GPUs or memory doesn't limit their number of trials."""


class Workers:
    """Runs at most `size` trials at a time. Trials share a GPU only if their estimates fit its memory."""

    def __init__(self, group: WorkerGroup, layout: Layout, bytes_of: dict[tuple[str, str], int | None]):
        self.size = layout.slots
        self.bytes_of = bytes_of
        """Estimated GPU memory in bytes by (model, task); empty if memory doesn't limit the number of trials."""
        self._group, self._gpu_bytes = group, layout.gpu_bytes

    @property
    def running(self) -> list[TrialJob]:
        """The running jobs."""
        return self._group.running

    def start(self, jobs: Iterable[TrialJob]) -> list[TrialJob]:
        """Start jobs in order until one doesn't fit, so that small trials don't overtake a large one. Return them."""
        started = []
        for job in jobs:
            slot = next((slot for slot in self._group.idle if self._fits(job, slot)), None)
            if slot is None:
                break
            slot.give(job, "run", job)
            started.append(job)
        return started

    def wait(self, seconds: float) -> list[FinishedJob]:
        """Wait up to `seconds` for a job to end, and return the ended jobs.

        Raises a UserError if workers repeatedly die while starting.
        """
        finished = []
        for ended in self._group.wait(seconds):
            finished.append(_finished(ended))
            if finished[-1].is_broken:
                self._group.replace(ended.worker)
        return finished

    def _fits(self, job: TrialJob, slot: Slot) -> bool:
        neighbours = [other.job for other in self._group.slots if other.location == slot.location and other.job]
        if self._gpu_bytes is None or not neighbours:
            return True
        sizes = [neighbour.bytes for neighbour in [job, *neighbours]]
        known = [size + _CONTEXT_BYTES for size in sizes if size is not None]
        return len(known) == len(sizes) and sum(known) <= _USABLE * self._gpu_bytes


def _finished(ended: EndedJob) -> FinishedJob:
    if ended.lost:
        return FinishedJob(ended.job, lost="its worker died")
    if ended.error is None:
        return ended.value
    # Workers catch a trial's errors, so this is a different one, such as a value that can't be pickled.
    trace = "".join(traceback.format_exception(ended.error))
    return FinishedJob(ended.job, failed_record(ended.job, ended.error, trace), written=False)


def choose_layout(
    cluster: SweepCluster, cpus: int, gpus: int, gpu_bytes: int | None, estimates: Iterable[int | None]
) -> Layout:
    """Choose how many trials run at a time, in total and on each GPU.

    `cpus` and `gpus` are the cluster's, `gpu_bytes` is the memory of one GPU if known, and `estimates` are the GPU
    bytes of each kind of trial, None if unknown.
    """
    slots = min(cluster.at_once or math.inf, max(cpus // cluster.cpus_per_trial, 1))
    if not gpus:
        return Layout(int(slots), int(slots))
    known = [size for size in estimates if size is not None]
    if cluster.trials_per_gpu != "auto":
        per_gpu, gpu_bytes = cluster.trials_per_gpu, None
    elif gpu_bytes is None or not known:
        per_gpu = 1
    else:
        # As many as fit of the smallest trials; `Workers.start` runs fewer if trials are larger.
        per_gpu = max(int(_USABLE * gpu_bytes // (min(known) + _CONTEXT_BYTES)), 1)
    slots = int(min(slots, gpus * per_gpu))
    per_gpu = math.ceil(slots / gpus)
    # Ray rounds shares of a GPU to ten-thousandths.
    return Layout(slots, per_gpu, math.floor(10_000 / per_gpu) / 10_000, gpu_bytes if per_gpu > 1 else None)


@contextmanager
def open_workers(
    module: str,
    output: str,
    cluster: SweepCluster,
    estimate_bytes: Callable[[], dict[tuple[str, str], int | None]],
    inputs: list[str],
) -> Iterator[Workers]:
    """Start workers on this machine or on the YAML's cluster, and kill them when the context ends.

    `estimate_bytes` returns the estimated GPU memory of a trial in bytes, by (model, task); it is called only if GPU
    memory limits the number of trials. `inputs` are the folders of models and data. Raises a UserError if no cluster
    answers or its nodes don't share the output and the inputs.
    """
    threads = cluster.cpus_per_trial
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    environment["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    imports = _TRIAL_IMPORTS if module == TRIAL_MODULE else ()
    modules = ("torch", "biphasic.sweep.workers", module, *imports)
    with open_group(cluster, [output, *inputs], environment, modules) as group:
        gpu_bytes = group.smallest_gpu_bytes() if group.gpus and cluster.trials_per_gpu == "auto" else None
        estimates = estimate_bytes() if gpu_bytes else {}
        # On one machine the YAML may allow more concurrent trials than there are cores.
        cpus = max(group.cpus, (cluster.at_once or 1) * threads) if cluster.address is None else group.cpus
        layout = choose_layout(cluster, cpus, group.gpus, gpu_bytes, estimates.values())
        arguments = (module, output, threads, layout.per_device)
        group.open(layout.slots, "cluster.at_once", Worker, *arguments, cpus=threads, gpu_share=layout.share_of_gpu)
        yield Workers(group, layout, estimates)
