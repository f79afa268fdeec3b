"""Run a conversion's work units in this process, or on worker processes of this machine or a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from biphasic.conversion.output import write_error_message
from biphasic.conversion.reading import DamagedFileError
from biphasic.conversion.work_units import ConversionContext, UnitRecord, WorkUnit
from biphasic.conversion.worker import Report, convert_unit
from biphasic.errors import UserError
from biphasic.workers import open_engine
from biphasic.workers.engine import Engine, WorkerLostError
from biphasic.workers.group import EndedJob, WorkerGroup
from biphasic.workers.resources import available_cores

_REPORT_SECONDS = 0.5
_MODULES = ("biphasic.conversion.pool", "streaming")
"""What workers import."""


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


@dataclass(frozen=True)
class _UnitJob:
    """A unit for a worker, and how many workers it has been given to."""

    unit: WorkUnit
    max_tokens: int | None
    attempt: int = 1


class WorkerPool:
    """Runs units on workers. A unit whose worker dies is given to another worker, up to `cluster.retries` times."""

    def __init__(self, context: ConversionContext, engine: Engine, size: int, print_line: Callable[[str], None]):
        self.size = size
        self._retries, self._print_line = context.config.cluster.retries, print_line
        self._waiting: deque[_UnitJob] = deque()
        self._results: deque[UnitResult] = deque()
        self._workers: WorkerGroup[_UnitJob] = WorkerGroup(
            engine, lambda: engine.start(UnitWorker, context), size, "cluster.workers"
        )

    def submit(self, unit: WorkUnit, max_tokens: int | None) -> None:
        """Add a unit, which the next idle worker will run."""
        self._waiting.append(_UnitJob(unit, max_tokens))

    def next(self) -> UnitResult:
        """Wait until one of the submitted units ends, and return its result.

        Raises:
            UserError: workers repeatedly die while they start.
        """
        while not self._results:
            for slot in self._workers.idle[: len(self._waiting)]:
                job = self._waiting.popleft()
                slot.give(job, "convert", job.unit, job.max_tokens)
            for ended in self._workers.wait(_REPORT_SECONDS):
                self._take(ended)
        return self._results.popleft()

    def _take(self, ended: EndedJob[_UnitJob]) -> None:
        """Keep a unit's result, or let another worker run the unit."""
        job, unit = ended.job, ended.job.unit
        if not isinstance(ended.error, WorkerLostError):
            if ended.error is not None:
                raise ended.error
            self._results.append(ended.value)
        elif job.attempt > self._retries:
            advice = "is there memory for each worker (cluster.workers)?"
            fault = f"{unit.description}: its worker {ended.error.end} {job.attempt} times; {advice}"
            self._results.append(UnitResult(unit, fault=fault))
        else:
            line = f"{unit.description}: its worker {ended.error.end}; the work unit is given to another one"
            self._print_line(line)
            self._waiting.appendleft(replace(job, attempt=job.attempt + 1))


class UnitWorker:
    """Converts units in a worker process."""

    def __init__(self, context: ConversionContext, report: Report):
        # Pickling loses this setting, which encodes names of special tokens in a text as plain text.
        context.tokenizer.tokenizer.encode_special_tokens = True
        self._context, self._report = context, report

    def convert(self, unit: WorkUnit, max_tokens: int | None) -> UnitResult:
        """Convert a unit."""
        return run_unit(self._context, unit, max_tokens, self._report)


@contextmanager
def open_pool(
    context: ConversionContext, units: int, report: Report, print_line: Callable[[str], None]
) -> Iterator[InlinePool | WorkerPool]:
    """Open the pool that the YAML's `cluster:` section describes, for this number of units.

    Raises:
        UserError: the cluster does not exist, or its nodes don't share the output.
    """
    config, cluster = context.config, context.config.cluster
    if cluster.address is None and min(units, cluster.workers or available_cores()) <= 1:
        yield InlinePool(context, report)
        return
    environment = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
    with open_engine(cluster, config.output, environment, _MODULES, report) as engine:
        yield WorkerPool(context, engine, max(min(units, cluster.workers or engine.cpus), 1), print_line)
