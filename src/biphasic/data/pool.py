"""Where a conversion's tasks run: in this process, or on Ray, here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from biphasic.cluster import connected, cores, require_shared
from biphasic.config.conversion import ClusterConfig
from biphasic.config.errors import UserError
from biphasic.data.reading import DamagedFile
from biphasic.data.work import Limit, Record, Task, Work
from biphasic.data.worker import convert_task
from biphasic.storage import short

if TYPE_CHECKING:
    from ray import ObjectRef

_LOOK_EVERY = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a task ended: with a record; with a fault of its own (`damaged`), which leaves the others their chance; or
    with one that stops everything."""

    task: Task
    record: Record | None = None
    damaged: str | None = None
    fault: str | None = None


Report = Callable[[int, int], None]


class Pool(Protocol):
    """Runs tasks, up to `size` at a time."""

    size: int

    def submit(self, task: Task, limit: Limit) -> None:
        """Hand in a task."""
        ...

    def next(self) -> Outcome:
        """Wait for one of the tasks that were handed in to end."""
        ...


def outcome_of(work: Work, task: Task, limit: Limit, report: Report) -> Outcome:
    """Convert a task; what goes wrong is told in one line instead of raised."""
    try:
        return Outcome(task, record=convert_task(work, task, limit, report))
    except DamagedFile as error:
        return Outcome(task, damaged=str(error))
    except UserError as error:
        return Outcome(task, fault=str(error))
    except OSError as error:
        advice = "what is finished is kept; mend that, and run the same command again"
        return Outcome(task, fault=f"output {work.config.output}: can't be written ({short(error)}); {advice}")


class InlinePool:
    """One task at a time, in this process; its tokenizer uses all cores."""

    size = 1

    def __init__(self, work: Work, report: Report):
        self._work, self._report = work, report
        self._waiting: list[tuple[Task, Limit]] = []

    def submit(self, task: Task, limit: Limit) -> None:
        """See `Pool`."""
        self._waiting.append((task, limit))

    def next(self) -> Outcome:
        """See `Pool`."""
        task, limit = self._waiting.pop(0)
        return outcome_of(self._work, task, limit, self._report)


class RayPool:
    """Tasks on Ray's workers. A task whose worker dies is given to another one."""

    def __init__(self, work: Work, cluster: ClusterConfig, size: int, report: Report, say: Callable[[str], None]):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.size = size
        self._cluster, self._report, self._say = cluster, report, say
        self._work = ray.put(work)
        # Beside the command: another machine may leave.
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._counter: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(_Counter).remote()
        self._convert = ray.remote(num_cpus=cluster.cpus_per_worker, max_retries=0)(_convert)
        self._running: dict[ObjectRef, tuple[Task, Limit, int]] = {}

    def submit(self, task: Task, limit: Limit, attempt: int = 0) -> None:
        """See `Pool`."""
        found = self._convert.remote(self._work, task, limit, self._counter)
        self._running[found] = (task, limit, attempt)

    def next(self) -> Outcome:
        """See `Pool`."""
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        while True:
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=_LOOK_EVERY)
            self._report(*ray.get(self._counter.taken.remote()))
            for reference in done:
                task, limit, attempt = self._running.pop(reference)
                try:
                    return ray.get(reference)
                except (WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
                    why = "ran out of memory" if isinstance(error, OutOfMemoryError) else "died"
                    if attempt >= self._cluster.retries:
                        advice = "is there memory for each worker (cluster.workers)?"
                        return Outcome(task, fault=f"{task.what()}: its worker {why} {attempt + 1} times; {advice}")
                    self._say(f"{task.what()}: its worker {why}; the task is given to another one")
                    self.submit(task, limit, attempt + 1)
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from None


def _convert(work: Work, task: Task, limit: Limit, counter: Any) -> Outcome:
    """What runs on a worker."""
    # A tokenizer that has travelled takes special tokens in a text for what they look like.
    work.tokenizer.tokenizer.encode_special_tokens = True
    return outcome_of(work, task, limit, counter.add.remote)


class _Counter:
    """Collects the workers' progress."""

    def __init__(self) -> None:
        self.tokens = self.bytes = 0

    def add(self, tokens: int, size: int) -> None:
        """Count."""
        self.tokens += tokens
        self.bytes += size

    def taken(self) -> tuple[int, int]:
        """What came since the last call."""
        found = (self.tokens, self.bytes)
        self.tokens = self.bytes = 0
        return found


@contextmanager
def open_pool(work: Work, tasks: int, report: Report, say: Callable[[str], None]) -> Iterator[Pool]:
    """The pool that the YAML's `cluster:` asks for, for so many tasks.

    Raises:
        UserError: there is no such cluster, or its machines don't share the output.
    """
    cluster = work.config.cluster
    wanted = min(tasks, cluster.workers or max(cores() // cluster.cpus_per_worker, 1))
    if cluster.address is None and wanted <= 1:
        yield InlinePool(work, report)
        return
    import ray

    threads = str(cluster.cpus_per_worker)
    environment = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
    with connected(cluster.address, wanted * cluster.cpus_per_worker, environment):
        if cluster.address is not None:
            found = int(ray.cluster_resources().get("CPU", 1)) // cluster.cpus_per_worker
            wanted = min(tasks, cluster.workers or max(found, 1))
            require_shared(work.config.output, cluster.shared_folder)
        yield RayPool(work, cluster, wanted, report, say)
