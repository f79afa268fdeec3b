"""Give a sweep's trials to worker processes: one for each concurrent trial, reused for later trials.

A worker writes its trial's record, so no finished trial is lost if the driver dies. Workers are killed as soon as the
driver dies, so that they never train at the same time as a restarted sweep.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from biphasic.config.sweep import SweepCluster
from biphasic.sweep.grid import TRIAL_MODULE
from biphasic.sweep.worker import FinishedJob, TrialJob, Worker, failed_record
from biphasic.workers import open_workers as open_group
from biphasic.workers.group import EndedJob, Slot, WorkerGroup

_USABLE = 0.9
"""Largest share of a GPU's memory that the estimates of its trials may add up to."""
_CONTEXT_BYTES = 600 * 2**20
"""GPU memory of the CUDA context and kernels in each process, in bytes."""
_TRIAL_IMPORTS = ("composer", "biphasic.finetuning.trainer", "biphasic.export.finetuned")
"""Modules that a fine-tuning imports only when it runs."""

EstimateBytes = Callable[[], dict[tuple[str, str], int | None]]
"""Returns the estimated GPU memory of a trial, in bytes, by (model, task)."""


@dataclass(frozen=True)
class Layout:
    """How many trials run at the same time and how they share devices."""

    slots: int
    """Number of concurrent trials."""
    per_device: int
    """Number of concurrent trials on a GPU, or in total if there are no GPUs."""
    share_of_gpu: float = 0.0
    gpu_bytes: int | None = None
    """Memory of each GPU in bytes; None if there are no GPUs or memory doesn't limit the number of trials on each."""


class Workers:
    """Runs at most `size` trials at a time. Trials share a GPU only if their estimates fit its memory."""

    def __init__(self, group: WorkerGroup, layout: Layout, bytes_of: dict[tuple[str, str], int | None]):
        self.size = layout.slots
        self.bytes_of = bytes_of
        """Estimated GPU memory by (model, task), in bytes; empty if it doesn't affect how many trials run."""
        self._group, self._gpu_bytes = group, layout.gpu_bytes

    @property
    def running(self) -> list[TrialJob]:
        """The jobs that are running."""
        return self._group.running

    def start(self, jobs: Iterable[TrialJob]) -> list[TrialJob]:
        """Start jobs in order until one doesn't fit, so that smaller trials do not overtake a large one.

        Returns:
            The jobs that started.
        """
        started = []
        for job in jobs:
            slot = next((slot for slot in self._group.idle if self._fits(job, slot)), None)
            if slot is None:
                break
            slot.give(job, "run", job)
            started.append(job)
        return started

    def wait(self, seconds: float) -> list[FinishedJob]:
        """Wait up to `seconds` for a job to end, and return the jobs that ended.

        Raises:
            UserError: workers repeatedly die while they start.
        """
        return [_finished(ended) for ended in self._group.wait(seconds)]

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
    # Workers catch a trial's errors, so this is another error, for example a value that can't be pickled.
    trace = "".join(traceback.format_exception(ended.error))
    return FinishedJob(ended.job, failed_record(ended.job, ended.error, trace), written=False)


def choose_layout(
    cluster: SweepCluster, cpus: int, gpus: int, gpu_bytes: int | None, estimates: Iterable[int | None]
) -> Layout:
    """Choose how many trials run at the same time, in total and on each GPU.

    Args:
        cluster: the YAML's `cluster:` section.
        cpus: number of cores in the cluster.
        gpus: number of GPUs in the cluster.
        gpu_bytes: memory of one GPU in bytes, if known.
        estimates: GPU memory of each kind of trial in bytes; None if unknown.
    """
    limit = cluster.at_once or math.inf
    by_cores = max(cpus // cluster.cpus_per_trial, 1)
    if not gpus:
        slots = int(min(limit, by_cores))
        return Layout(slots, slots)
    known = [size for size in estimates if size is not None]
    if cluster.trials_per_gpu != "auto":
        per_gpu, gpu_bytes = cluster.trials_per_gpu, None
    elif gpu_bytes is None or not known:
        per_gpu = 1
    else:
        # The number of the smallest trials that fit; `Workers.start` runs fewer if trials are larger.
        per_gpu = max(int(_USABLE * gpu_bytes // (min(known) + _CONTEXT_BYTES)), 1)
    slots = int(min(limit, by_cores, gpus * per_gpu))
    per_gpu = math.ceil(slots / gpus)
    # Ray rounds shares of a GPU to ten-thousandths.
    return Layout(slots, per_gpu, math.floor(10_000 / per_gpu) / 10_000, gpu_bytes if per_gpu > 1 else None)


@contextmanager
def open_workers(module: str, output: str, cluster: SweepCluster, estimate_bytes: EstimateBytes) -> Iterator[Workers]:
    """Start workers on this machine or on the cluster in the YAML, and kill them when the context ends.

    Args:
        module: the module whose functions run trials.
        output: the folder or bucket prefix for records.
        cluster: the YAML's `cluster:` section.
        estimate_bytes: called only if GPU memory affects how many trials run.

    Raises:
        UserError: no cluster answers, or its nodes don't share the output.
    """
    threads = str(cluster.cpus_per_trial)
    environment = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    environment["TOKENIZERS_PARALLELISM"] = "true" if cluster.cpus_per_trial > 1 else "false"
    imports = _TRIAL_IMPORTS if module == TRIAL_MODULE else ()
    with open_group(cluster, output, environment, ("torch", "biphasic.sweep.worker", module, *imports)) as group:
        gpu_bytes = group.smallest_gpu_bytes() if group.gpus and cluster.trials_per_gpu == "auto" else None
        estimates = estimate_bytes() if gpu_bytes else {}
        cpus, threads = group.cpus, cluster.cpus_per_trial
        if cluster.address is None:
            # The YAML may ask for more trials at a time than this machine has cores for.
            cpus = max(cpus, (cluster.at_once or 1) * threads)
        layout = choose_layout(cluster, cpus, group.gpus, gpu_bytes, estimates.values())
        arguments = (module, output, threads, layout.per_device)
        share = layout.share_of_gpu
        group.open(layout.slots, "cluster.at_once", Worker, *arguments, cpus=threads, gpu_share=share)
        yield Workers(group, layout, estimates)
