"""Run a sweep's trials in worker processes: one for each concurrent trial, reused for later trials.

A worker writes the records of its trials, so no finished trial is lost if the driver dies. Workers are killed when the
driver dies, so that they never train at the same time as a restarted sweep.
"""

import gc
import math
import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepCluster
from biphasic.errors import UserError, first_line
from biphasic.storage import open_store
from biphasic.sweep.grid import TRIAL_MODULE
from biphasic.sweep.records import PREDICTIONS_FOLDER, Cell, TrialRecord, write_record
from biphasic.workers import open_workers as open_group
from biphasic.workers.group import EndedJob, UnusableWorker, WorkerGroup

_TRIAL_IMPORTS = ("composer", "biphasic.finetuning.trainer", "biphasic.export.finetuned")
"""Modules that fine-tuning imports lazily."""


@dataclass(frozen=True)
class TrialJob:
    """A trial for a worker."""

    trial: str
    cell: Cell
    config: FinetuneConfig
    attempt: int = 0


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
        self._folder, self._per_device = open_store(output), per_device
        if (fault := _gpu_fault()) is not None:
            place = f"{socket.gethostname()}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
            raise UnusableWorker(f"{place}: {fault} (CUDA_VISIBLE_DEVICES= runs trials on CPUs)")
        # Otherwise each trial's garbage collection would spend a third of a second on the imported modules.
        gc.collect()
        gc.freeze()

    def run(self, job: TrialJob) -> FinishedJob:
        """Train, score and write the record."""
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
        files: dict[str, bytes] = {}
        try:
            # The trial is recorded by the name that the driver gave it. Afterwards again, because test sets are read last.
            name = job.trial.rpartition(".")[2]
            self._functions.require_unchanged(job.config, name)
            result = self._functions.run_trial(job.config)
            self._functions.require_unchanged(job.config, name)
            about = {"attempt": job.attempt, "trials_on_device": self._per_device, **result.about}
            seconds = {"total": time.monotonic() - start, **result.seconds}
            record = TrialRecord(job.trial, job.cell, "done", tuple(result.results), seconds=seconds, about=about)
            files = result.predictions
        except Exception as error:
            # Here, because a sweep must name missing files before torch is imported.
            from biphasic.devices import is_out_of_memory

            if is_out_of_memory(error) and self._per_device > 1:
                return FinishedJob(job, lost="its GPU was full")
            record = failed_record(job, error, traceback.format_exc())
            record = replace(record, seconds={"total": time.monotonic() - start})
            if _gpu_fault() is not None:
                return FinishedJob(job, record, False, f"its GPU failed ({first_line(error)})", is_broken=True)
        try:
            for name, content in files.items():
                self._folder.write(f"{PREDICTIONS_FOLDER}/{job.trial}/{name}", content)
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


def finished_job(ended: EndedJob) -> FinishedJob:
    """Return the outcome of a worker's call."""
    if ended.lost:
        return FinishedJob(ended.job, lost="its worker died")
    if ended.error is None:
        return ended.value
    # Workers catch a trial's errors, so this is a different one, such as a value that can't be pickled.
    trace = "".join(traceback.format_exception(ended.error))
    return FinishedJob(ended.job, failed_record(ended.job, ended.error, trace), written=False)


def choose_layout(cluster: SweepCluster, cpus: int, gpus: int) -> tuple[int, int, float]:
    """Return how many trials run at a time, in total and on each GPU (or machine without), and a trial's share of a GPU.

    `cpus` and `gpus` are the numbers of the machine or the cluster.
    """
    slots = min(cluster.at_once or math.inf, max(cpus // cluster.cpus_per_trial, 1))
    if not gpus:
        return int(slots), int(slots), 0.0
    slots = int(min(slots, gpus * cluster.trials_per_gpu))
    per_gpu = math.ceil(slots / gpus)
    return slots, per_gpu, math.floor(10_000 / per_gpu) / 10_000  # Ray rounds shares to ten-thousandths


@contextmanager
def open_workers(module: str, output: str, cluster: SweepCluster, inputs: list[str]) -> Iterator[WorkerGroup]:
    """Start workers on this machine or on the YAML's cluster, and kill them when the context ends.

    `inputs` are the folders of models and data. Raises a UserError if no cluster answers or its nodes don't share the
    output and the inputs.
    """
    threads = cluster.cpus_per_trial
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    environment["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    imports = _TRIAL_IMPORTS if module == TRIAL_MODULE else ()
    modules = ("torch", "biphasic.sweep.workers", module, *imports)
    with open_group(cluster, [output, *inputs], environment, modules) as group:
        # On one machine the YAML may allow more concurrent trials than there are cores.
        cpus = max(group.cpus, (cluster.at_once or 1) * threads) if cluster.address is None else group.cpus
        slots, per_device, share = choose_layout(cluster, cpus, group.gpus)
        arguments = (module, output, threads, per_device)
        group.open(slots, "cluster.at_once", Worker, *arguments, cpus=threads, gpu_share=share)
        yield group
