"""Manage the Ray workers of a sweep: a process for each concurrent trial, reused for later trials.

A worker writes its trial's record, so no finished trial is lost if the driver dies. Workers are killed as soon as the Ray
process that started them dies, so that they never train at the same time as a restarted sweep.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from biphasic.cluster import available_cores, ray_session, require_shared
from biphasic.config.sweep import SweepCluster
from biphasic.errors import UserError
from biphasic.sweep.worker import FinishedJob, TrialJob, Worker, WorkerLocation, failed_record

if TYPE_CHECKING:
    from ray import ObjectRef

_USABLE = 0.9
"""Largest share of a GPU's memory that the estimates of its trials may add up to."""
_CONTEXT_BYTES = 600 * 2**20
"""GPU memory of the CUDA context and kernels in each process, in bytes."""
_MAX_FAILED_STARTS = 3
"""The sweep fails after this many consecutive workers died while they started."""


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


class _Slot:
    """A worker process and its job."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.location: WorkerLocation | None = None
        """None until the worker is ready."""
        self.job: TrialJob | None = None
        self.pending: ObjectRef | None = actor.location.remote()


class Workers:
    """Runs at most `size` trials at a time. Trials share a GPU only if their estimates fit its memory."""

    def __init__(
        self,
        module: str,
        output: str,
        cluster: SweepCluster,
        layout: Layout,
        bytes_of: dict[tuple[str, str], int | None],
    ):
        self.size = layout.slots
        self.bytes_of = bytes_of
        """Estimated GPU memory by (model, task), in bytes; empty if it doesn't affect how many trials run."""
        self._layout = layout
        self._arguments = (module, output, cluster.cpus_per_trial, layout.per_device)
        self._options = {"num_cpus": cluster.cpus_per_trial, "num_gpus": layout.share_of_gpu, "max_restarts": 0}
        self._failed_starts = 0
        self._slots = [self._start_worker() for _ in range(self.size)]

    @property
    def running(self) -> list[TrialJob]:
        """The jobs that are running."""
        return [slot.job for slot in self._slots if slot.job is not None]

    def start(self, jobs: Iterable[TrialJob]) -> list[TrialJob]:
        """Start jobs in order until one doesn't fit, so that smaller trials do not overtake a large one.

        Returns:
            The jobs that started.
        """
        started = []
        for job in jobs:
            idle = [slot for slot in self._slots if slot.location is not None and slot.pending is None]
            slot = next((slot for slot in idle if self._fits(job, slot)), None)
            if slot is None:
                break
            slot.job, slot.pending = job, slot.actor.run.remote(job)
            started.append(job)
        return started

    def wait(self, seconds: float) -> list[FinishedJob]:
        """Wait up to `seconds` for a job to end, and return the jobs that ended.

        Raises:
            UserError: workers repeatedly die while they start.
        """
        import ray

        slots = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        if not slots:
            time.sleep(seconds)
            return []
        ready, _ = ray.wait(list(slots), num_returns=1, timeout=seconds)
        return [finished for reference in ready if (finished := self._collect(slots[reference])) is not None]

    def stop(self) -> None:
        """Kill all workers."""
        import ray

        for slot in self._slots:
            slot.job = slot.pending = None
            ray.kill(slot.actor)

    def _collect(self, slot: _Slot) -> FinishedJob | None:
        """Return the finished job of a slot's pending call; None if the call was the worker's start."""
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

        job, reference, slot.job, slot.pending = slot.job, slot.pending, None, None
        assert reference is not None
        try:
            value = ray.get(reference)
        except (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
            # Ray's `max_restarts` is not used, because a new worker may get another GPU, and one that dies at every start
            # has to be reported.
            self._slots[self._slots.index(slot)] = self._start_worker()
            if job is not None:
                out_of_memory = isinstance(error, OutOfMemoryError) or "low on memory" in str(error)
                return FinishedJob(job, lost=f"its worker {'ran out of memory' if out_of_memory else 'died'}")
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(
                    f"workers die while they start ({reason}): is there memory for {self.size} of them (cluster.at_once)?"
                ) from None
            return None
        except RayTaskError as error:
            if job is None:
                raise error.as_instanceof_cause() from None
            # Workers catch a trial's errors, so this is another error, for example a value that can't be pickled.
            return FinishedJob(job, failed_record(job, error.cause or error, str(error)), written=False)
        if job is not None:
            return value
        self._failed_starts, slot.location = 0, value
        return None

    def _fits(self, job: TrialJob, slot: _Slot) -> bool:
        memory = self._layout.gpu_bytes
        neighbours = [other.job for other in self._slots if other.location == slot.location and other.job is not None]
        if memory is None or not neighbours:
            return True
        sizes = [neighbour.bytes for neighbour in [job, *neighbours]]
        known = [size + _CONTEXT_BYTES for size in sizes if size is not None]
        return len(known) == len(sizes) and sum(known) <= _USABLE * memory

    def _start_worker(self) -> _Slot:
        import ray

        return _Slot(ray.remote(Worker).options(**self._options).remote(*self._arguments))  # pyright: ignore


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
    """Start Ray workers on this machine or on the cluster in the YAML, and kill them when the context ends.

    Args:
        module: the module whose functions run trials.
        output: the folder or bucket prefix for records.
        cluster: the YAML's `cluster:` section.
        estimate_bytes: called only if GPU memory affects how many trials run.

    Raises:
        UserError: no cluster answers, or its nodes don't share the output.
    """
    import ray

    threads = str(cluster.cpus_per_trial)
    environment = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    environment["TOKENIZERS_PARALLELISM"] = "true" if cluster.cpus_per_trial > 1 else "false"
    local_cpus = max(available_cores(), (cluster.at_once or 1) * cluster.cpus_per_trial)
    with ray_session(cluster.address, local_cpus, environment):
        if cluster.address is not None:
            require_shared(output, cluster.shared_folder)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        gpu_bytes = None
        if gpus and cluster.trials_per_gpu == "auto":
            # Runs on a node with a GPU, because this node may have none.
            gpu_bytes = ray.get(ray.remote(num_cpus=0, num_gpus=0.001, max_retries=3)(_smallest_gpu_bytes).remote())
        estimates = estimate_bytes() if gpu_bytes else {}
        layout = choose_layout(cluster, int(resources.get("CPU", 1)), gpus, gpu_bytes, estimates.values())
        workers = Workers(module, output, cluster, layout, estimates)
        try:
            yield workers
        finally:
            workers.stop()


def _smallest_gpu_bytes() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        sizes = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        return min(int(line) for line in sizes.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
