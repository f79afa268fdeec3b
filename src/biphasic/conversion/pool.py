"""Run a conversion's work units in this process, or on worker processes of this machine or a Ray cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import starmap

from biphasic.conversion.output import write_error_message
from biphasic.conversion.progress import Progress, UnitResult
from biphasic.conversion.reading import DamagedFileError
from biphasic.conversion.work_units import ConversionContext, WorkUnit
from biphasic.conversion.worker import Report, convert_unit
from biphasic.errors import UserError
from biphasic.workers import open_workers
from biphasic.workers.group import WorkerGroup
from biphasic.workers.resources import available_cores

_REPORT_SECONDS = 0.5
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
_MODULES = ("biphasic.conversion.pool", "streaming")
"""What workers import."""


Job = tuple[WorkUnit, int | None]
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

    def convert_all(self, jobs: Iterator[Job]) -> Iterator[UnitResult]:
        """Yield the results of units that are converted one after the other. The tokenizer uses all cores."""
        return starmap(self.convert, jobs)


class WorkerPool:
    """Converts units on workers. A unit whose worker dies is given to another worker, up to `cluster.retries` times."""

    def __init__(self, context: ConversionContext, group: WorkerGroup, size: int, progress: Progress):
        self._group, self._progress, self._retries = group, progress, context.config.cluster.retries
        group.open(size, "cluster.workers", UnitWorker, context, group.make_report())

    def convert_all(self, jobs: Iterator[Job]) -> Iterator[UnitResult]:
        """Yield the results of units as they end. The next job is taken when a worker is idle.

        Raises:
            UserError: workers repeatedly die while they start.
        """
        lost, losses = deque[Job](), Counter[str]()
        while True:
            for slot in self._group.idle:
                if (job := lost.popleft() if lost else next(jobs, None)) is None:
                    break
                slot.give(job, "convert", *job)
            if self._group.idle and not self._group.running:
                return
            for ended in self._group.wait(_REPORT_SECONDS):
                if ended.error is not None and not ended.lost:
                    raise ended.error
                if not ended.lost:
                    yield ended.value
                    continue
                unit, _ = ended.job
                losses[unit.name] += 1
                if losses[unit.name] > self._retries:
                    fault = (
                        f"its worker died {losses[unit.name]} times; is there memory for each worker (cluster.workers)?"
                    )
                    yield UnitResult(unit, fault=f"{unit.description}: {fault}")
                    continue
                self._progress.print_line(f"{unit.description}: its worker died; the work unit is given to another one")
                lost.append(ended.job)
            for values in self._group.take_reports():
                self._progress.add(*values)


@contextmanager
def open_pool(context: ConversionContext, units: int, progress: Progress) -> Iterator[UnitWorker | WorkerPool]:
    """Open the pool that the YAML's `cluster:` section describes, for this number of units.

    Raises:
        UserError: the cluster does not exist, or its nodes don't share the output.
    """
    config, cluster = context.config, context.config.cluster
    if units == 0 or (cluster.address is None and min(units, cluster.workers or available_cores()) == 1):
        yield UnitWorker(context, progress.add)
        return
    with open_workers(cluster, config.output, _ENVIRONMENT, _MODULES) as group:
        yield WorkerPool(context, group, min(units, cluster.workers or group.cpus), progress)
