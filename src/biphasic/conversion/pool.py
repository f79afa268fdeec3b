"""Run a conversion's work units in this process, or with Ray on this node or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from biphasic.cluster import available_cores, ray_session, require_shared
from biphasic.config.convert import ConvertCluster
from biphasic.conversion.output import write_error_message
from biphasic.conversion.reading import DamagedFileError
from biphasic.conversion.work_units import ConversionContext, UnitRecord, WorkUnit
from biphasic.conversion.worker import Report, convert_unit
from biphasic.errors import UserError

if TYPE_CHECKING:
    from ray import ObjectRef

_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: a record or a fault. A damaged file does not stop the other units."""

    unit: WorkUnit
    record: UnitRecord | None = None
    fault: str = ""
    damaged_file: bool = False


def run_unit(context: ConversionContext, unit: WorkUnit, max_tokens: int | None, report: Report) -> UnitResult:
    """Convert a unit, and return an error as one line instead of raising it."""
    try:
        return UnitResult(unit, record=convert_unit(context, unit, max_tokens, report))
    except UserError as error:
        return UnitResult(unit, fault=str(error), damaged_file=isinstance(error, DamagedFileError))
    except OSError as error:
        return UnitResult(unit, fault=write_error_message(context.config.output, error))


class InlinePool:
    """Runs one unit at a time in this process. The tokenizer uses all cores."""

    size = 1

    def __init__(self, context: ConversionContext, report: Report):
        self._context, self._report = context, report
        self._waiting: list[tuple[WorkUnit, int | None]] = []

    def submit(self, unit: WorkUnit, max_tokens: int | None) -> None:
        """Add a unit, which `next` will run."""
        self._waiting.append((unit, max_tokens))

    def next(self) -> UnitResult:
        """Run the next submitted unit and return its result."""
        return run_unit(self._context, *self._waiting.pop(0), self._report)


class RayPool:
    """Runs units on Ray workers. A unit whose worker dies is given to another worker, up to `cluster.retries` times.

    Ray's own retries are not used, because they repeat a unit that runs out of memory without end.
    """

    def __init__(self, context: ConversionContext, size: int, report: Report, print_line: Callable[[str], None]):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.size = size
        self._cluster: ConvertCluster = context.config.cluster
        self._report, self._print_line = report, print_line
        self._context = ray.put(context)
        # The counter runs on this command's node, because other nodes may leave the cluster.
        this_node: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._counter: Any = ray.remote(num_cpus=0, scheduling_strategy=this_node)(_ProgressCounter).remote()
        self._convert = ray.remote(num_cpus=1, max_retries=0)(_convert_on_worker)
        self._running: dict[ObjectRef, tuple[WorkUnit, int | None, int]] = {}

    def submit(self, unit: WorkUnit, max_tokens: int | None, attempt: int = 1) -> None:
        """Start a unit."""
        reference = self._convert.remote(self._context, unit, max_tokens, self._counter)
        self._running[reference] = (unit, max_tokens, attempt)

    def next(self) -> UnitResult:
        """Wait until one of the submitted units ends, and return its result."""
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        while True:
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=_REPORT_SECONDS)
            self._report(*ray.get(self._counter.take.remote()))
            for reference in done:
                unit, max_tokens, attempt = self._running.pop(reference)
                try:
                    return ray.get(reference)
                except (WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
                    end = "ran out of memory" if isinstance(error, OutOfMemoryError) else "died"
                    if attempt > self._cluster.retries:
                        advice = "is there memory for each worker (cluster.workers)?"
                        return UnitResult(unit, fault=f"{unit.description}: its worker {end} {attempt} times; {advice}")
                    self._print_line(f"{unit.description}: its worker {end}; the work unit is given to another one")
                    self.submit(unit, max_tokens, attempt + 1)
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from None


def _convert_on_worker(context: ConversionContext, unit: WorkUnit, max_tokens: int | None, counter: Any) -> UnitResult:
    # Pickling loses this setting, which encodes names of special tokens in a text as plain text.
    context.tokenizer.tokenizer.encode_special_tokens = True
    return run_unit(context, unit, max_tokens, counter.add.remote)


class _ProgressCounter:
    """Sums up the tokens and bytes that workers report."""

    def __init__(self) -> None:
        self.tokens = self.bytes = 0

    def add(self, tokens: int, size: int) -> None:
        """Add a worker's report."""
        self.tokens += tokens
        self.bytes += size

    def take(self) -> tuple[int, int]:
        """Return what was added since the last call."""
        counts = (self.tokens, self.bytes)
        self.tokens = self.bytes = 0
        return counts


@contextmanager
def open_pool(
    context: ConversionContext, units: int, report: Report, print_line: Callable[[str], None]
) -> Iterator[InlinePool | RayPool]:
    """Open the pool that the YAML's `cluster:` section describes, for this number of units.

    Raises:
        UserError: the cluster does not exist, or its nodes don't share the output.
    """
    cluster = context.config.cluster
    size = min(units, cluster.workers or available_cores())
    if cluster.address is None and size <= 1:
        yield InlinePool(context, report)
        return
    import ray

    environment = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
    with ray_session(cluster.address, size, environment):
        if cluster.address is not None:
            size = min(units, cluster.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1))
            require_shared(context.config.output, cluster.shared_folder)
        yield RayPool(context, size, report, print_line)
