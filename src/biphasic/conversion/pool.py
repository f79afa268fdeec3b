"""Run a conversion's work units in this process, or on worker processes of this machine or a Ray cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from biphasic.conversion.output import write_error_message
from biphasic.conversion.reading import DamagedFileError
from biphasic.conversion.work_units import ConversionContext, UnitRecord, WorkUnit
from biphasic.conversion.worker import Report, convert_unit
from biphasic.errors import UserError
from biphasic.workers import open_workers
from biphasic.workers.group import WorkerGroup
from biphasic.workers.resources import available_cores

_REPORT_SECONDS = 0.5
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
_MODULES = ("biphasic.conversion.pool", "streaming")
"""What workers import."""


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: a record or a fault. A damaged file does not stop the other units."""

    unit: WorkUnit
    record: UnitRecord | None = None
    fault: str = ""
    damaged_file: bool = False


_Job = tuple[WorkUnit, int | None]
"""A unit, and its limit of training tokens."""


class UnitWorker:
    """Converts units, in this process or in a worker."""

    def __init__(self, context: ConversionContext, report: Report):
        # Pickling loses this setting, which encodes names of special tokens in a text as plain text.
        context.tokenizer.tokenizer.encode_special_tokens = True
        self._context, self._report = context, report

    def convert(self, unit: WorkUnit, max_tokens: int | None) -> UnitResult:
        """Convert a unit, and return an error as one line instead of raising it."""
        try:
            return UnitResult(unit, record=convert_unit(self._context, unit, max_tokens, self._report))
        except UserError as error:
            return UnitResult(unit, fault=str(error), damaged_file=isinstance(error, DamagedFileError))
        except OSError as error:
            return UnitResult(unit, fault=write_error_message(self._context.config.output, error))


class InlinePool:
    """Runs one unit at a time in this process. The tokenizer uses all cores."""

    size = 1

    def __init__(self, context: ConversionContext, report: Report):
        self._worker, self._waiting = UnitWorker(context, report), deque[_Job]()

    def submit(self, unit: WorkUnit, max_tokens: int | None) -> None:
        """Add a unit, which `next` will run."""
        self._waiting.append((unit, max_tokens))

    def next(self) -> UnitResult:
        """Run the next submitted unit and return its result."""
        return self._worker.convert(*self._waiting.popleft())


class WorkerPool(InlinePool):
    """Runs units on workers. A unit whose worker dies is given to another worker, up to `cluster.retries` times."""

    def __init__(
        self,
        context: ConversionContext,
        group: WorkerGroup,
        size: int,
        report: Report,
        print_line: Callable[[str], None],
    ):
        self.size, self._group, self._report, self._print_line = size, group, report, print_line
        self._retries, self._lost = context.config.cluster.retries, Counter[str]()
        self._waiting, self._results = deque[_Job](), deque[UnitResult]()
        group.open(size, "cluster.workers", UnitWorker, context, group.make_report())

    def next(self) -> UnitResult:
        """Wait until one of the submitted units ends, and return its result.

        Raises:
            UserError: workers repeatedly die while they start.
        """
        while not self._results:
            for slot in self._group.idle[: len(self._waiting)]:
                job = self._waiting.popleft()
                slot.give(job, "convert", *job)
            for ended in self._group.wait(_REPORT_SECONDS):
                if ended.lost:
                    self._retry(ended.job)
                elif ended.error is not None:
                    raise ended.error
                else:
                    self._results.append(ended.value)
            for values in self._group.take_reports():
                self._report(*values)
        return self._results.popleft()

    def _retry(self, job: _Job) -> None:
        """Let another worker run a unit whose worker died."""
        unit, _ = job
        self._lost[unit.name] += 1
        if self._lost[unit.name] > self._retries:
            advice = "is there memory for each worker (cluster.workers)?"
            fault = f"{unit.description}: its worker died {self._lost[unit.name]} times; {advice}"
            self._results.append(UnitResult(unit, fault=fault))
        else:
            self._print_line(f"{unit.description}: its worker died; the work unit is given to another one")
            self._waiting.appendleft(job)


@contextmanager
def open_pool(
    context: ConversionContext, units: int, report: Report, print_line: Callable[[str], None]
) -> Iterator[InlinePool]:
    """Open the pool that the YAML's `cluster:` section describes, for this number of units.

    Raises:
        UserError: the cluster does not exist, or its nodes don't share the output.
    """
    config, cluster = context.config, context.config.cluster
    if cluster.address is None and min(units, cluster.workers or available_cores()) <= 1:
        yield InlinePool(context, report)
        return
    with open_workers(cluster, config.output, _ENVIRONMENT, _MODULES) as group:
        yield WorkerPool(context, group, max(min(units, cluster.workers or group.cpus), 1), report, print_line)
