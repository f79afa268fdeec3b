"""Ray workers that run trials: one process for each trial that runs at a time, used again for the next one.

A worker writes the record itself, so that the death of the driver loses nothing that is finished. It dies with the Ray
that has started it, at once, and never trains beside the next attempt at the same sweep.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from biphasic.cluster import connected, cores, require_shared
from biphasic.config.errors import UserError
from biphasic.config.sweep import SweepCluster
from biphasic.sweep.worker import Ended, Job, Where, Worker, failed

if TYPE_CHECKING:
    from ray import ObjectRef

_USABLE = 0.9
"""Share of a GPU's memory that trials may be estimated to fill."""
_CONTEXT_BYTES = 600 * 2**20
"""What CUDA itself takes of a GPU in each process, its kernels included."""
_STARTS = 3
"""Workers that may die in a row before they are ready, until it is no accident."""


Needs = Callable[[], list[int | None]]
"""Gives the estimated bytes of all trials."""


class _Slot:
    """A worker's process, and what it does now."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.where: Where | None = None
        self.job: Job | None = None
        self.waiting: ObjectRef | None = actor.ready.remote()


class Workers:
    """At most `size` trials at a time. Those on one GPU fit its memory together, as far as that is estimated."""

    def __init__(self, module: str, output: str, cluster: SweepCluster, sizes: Layout):
        self.size = sizes.slots
        self._layout = sizes
        self._arguments = (module, output, cluster.cpus_per_trial, sizes.per_device)
        self._options = {"num_cpus": cluster.cpus_per_trial, "num_gpus": sizes.share_of_gpu, "max_restarts": 0}
        self._deaths = 0
        self._slots = [self._start() for _ in range(self.size)]

    @property
    def running(self) -> list[Job]:
        """What is being run."""
        return [slot.job for slot in self._slots if slot.job is not None]

    def begin(self, jobs: list[Job]) -> None:
        """Run jobs for which `room` has said that there is room."""
        for job in jobs:
            slot = self._place(job, {})
            assert slot is not None
            slot.job, slot.waiting = job, slot.actor.run.remote(job)

    def room(self, jobs: Iterable[Job]) -> list[Job]:
        """As many of these, from the first on, as can begin now. A large one isn't overtaken by smaller ones."""
        found: list[Job] = []
        taken: dict[int, Job] = {}
        for job in jobs:
            slot = self._place(job, taken)
            if slot is None:
                break
            taken[id(slot)] = job
            found.append(job)
        return found

    def wait(self, seconds: float) -> list[Ended]:
        """Wait for jobs to end, so long at most.

        Raises:
            UserError: workers can't start.
        """
        import ray

        by_reference = {slot.waiting: slot for slot in self._slots if slot.waiting is not None}
        if not by_reference:
            time.sleep(seconds)
            return []
        done, _ = ray.wait(list(by_reference), num_returns=1, timeout=seconds)
        return [ended for reference in done if (ended := self._look(by_reference[reference])) is not None]

    def stop(self) -> None:
        """Give up what runs."""
        import ray

        for slot in self._slots:
            slot.job = slot.waiting = None
            ray.kill(slot.actor)

    def _look(self, slot: _Slot) -> Ended | None:
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

        job, reference, slot.job, slot.waiting = slot.job, slot.waiting, None, None
        assert reference is not None
        try:
            found = ray.get(reference)
        except (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
            if job is None:
                self._deaths += 1
                if self._deaths >= _STARTS:
                    last = str(error).strip().splitlines()[-1]
                    raise UserError(f"workers die while they start ({last}): is there memory for {self.size} of them "
                                    "(cluster.at_once)?") from None  # fmt: skip
            self._slots[self._slots.index(slot)] = self._start()
            full = isinstance(error, OutOfMemoryError) or "low on memory" in str(error)
            why = "ran out of memory" if full else "died"
            return None if job is None else Ended(job, died=f"its worker {why}")
        except RayTaskError as error:
            if job is None:
                raise error.as_instanceof_cause() from None
            # No error of the trial's, which its worker had caught: what it gave can't travel, say.
            return Ended(job, failed(job, error.cause or error, str(error)), written=False)
        if job is None:
            self._deaths, slot.where = 0, found
            return None
        return found

    def _place(self, job: Job, taken: dict[int, Job]) -> _Slot | None:
        idle = [slot for slot in self._slots if slot.waiting is None and slot.where and id(slot) not in taken]
        return next((slot for slot in idle if self._fits(job, slot, taken)), None)

    def _fits(self, job: Job, slot: _Slot, taken: dict[int, Job]) -> bool:
        memory = self._layout.gpu_bytes
        if memory is None:
            return True
        beside = [taken.get(id(other), other.job) for other in self._slots if other.where == slot.where]
        there = [other for other in beside if other is not None]
        if not there:
            return True
        needed = [other.bytes for other in [job, *there]]
        return fits([size for size in needed if size is not None], memory) if None not in needed else False

    def _start(self) -> _Slot:
        import ray

        return _Slot(ray.remote(Worker).options(**self._options).remote(*self._arguments))  # pyright: ignore


@dataclass(frozen=True)
class Layout:
    """How trials share devices."""

    slots: int
    per_device: int
    """Trials at a time on a GPU, or on a machine without one."""
    share_of_gpu: float = 0.0
    gpu_bytes: int | None = None
    """Memory of each; None: there is none, or the YAML says how many trials it takes."""


def fits(sizes: list[int], memory: int) -> bool:
    """Whether trials of these bytes have room on a GPU together."""
    return sum(sizes) + _CONTEXT_BYTES * len(sizes) <= _USABLE * memory


def layout(cluster: SweepCluster, cpus: int, gpus: int, memory: int | None, needs: list[int | None]) -> Layout:
    """How many trials run at a time.

    Args:
        cluster: the YAML's section.
        cpus: cores there are.
        gpus: GPUs there are.
        memory: bytes of one, if that is known.
        needs: estimated bytes of all trials; None where that isn't known.
    """
    most = cluster.at_once or math.inf
    by_cores = max(cpus // cluster.cpus_per_trial, 1)
    if not gpus:
        slots = int(min(most, by_cores))
        return Layout(slots, slots)
    if cluster.trials_per_gpu != "auto":
        each, memory = cluster.trials_per_gpu, None
    elif memory is None or not (known := [need for need in needs if need is not None]):
        each = 1
    else:
        # As many as there may be of the smallest; larger ones find fewer places, see `Workers.room`.
        each = max(int(_USABLE * memory // (min(known) + _CONTEXT_BYTES)), 1)
    slots = int(min(most, by_cores, gpus * each))
    each = math.ceil(slots / gpus)
    # Ray counts in ten-thousandths.
    return Layout(slots, each, math.floor(10_000 / each) / 10_000, memory if each > 1 else None)


@contextmanager
def open_workers(module: str, output: str, cluster: SweepCluster, needs: Needs) -> Iterator[Workers]:
    """Workers on Ray, here or on the cluster that the YAML names.

    Args:
        module: of the functions that run trials.
        output: where records go.
        cluster: the YAML's section.
        needs: gives the estimated bytes of all trials; is asked only where GPUs are shared by them.

    Raises:
        UserError: there is no such cluster, or its machines don't share the output.
    """
    import ray

    threads = str(cluster.cpus_per_trial)
    parallel = "true" if cluster.cpus_per_trial > 1 else "false"
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads,
                   "TOKENIZERS_PARALLELISM": parallel}  # fmt: skip
    here = max(cores(), (cluster.at_once or 1) * cluster.cpus_per_trial)
    with connected(cluster.address, here, environment):
        if cluster.address is not None:
            require_shared(output, cluster.shared_folder)
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0))
        auto = gpus > 0 and cluster.trials_per_gpu == "auto"
        memory = _gpu_bytes() if auto else None
        yield Workers(
            module,
            output,
            cluster,
            layout(cluster, int(there.get("CPU", 1)), gpus, memory, needs() if memory else []),
        )


def _gpu_bytes() -> int | None:
    """Memory of the smallest GPU of one of the machines."""
    import ray

    return ray.get(ray.remote(num_cpus=0, num_gpus=0.001, max_retries=3)(_smallest_gpu).remote())


def _smallest_gpu() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
