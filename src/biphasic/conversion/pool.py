"""Run work units in this process, or on workers of this machine or a Ray cluster, and show the progress."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import starmap
from typing import NamedTuple

from tqdm import tqdm

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.output import write_error_message
from biphasic.conversion.worker import ConversionContext, Records, Report, UnitRecord, WorkUnit, convert_unit
from biphasic.data.bulk_encoding import BulkEncoder
from biphasic.errors import UserError
from biphasic.processes import available_cores
from biphasic.workers import open_workers
from biphasic.workers.group import WorkerGroup

_REPORT_SECONDS = 0.5
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}

Job = tuple[WorkUnit, int | None]
"""A unit, and its limit of training tokens."""


class UnitResult(NamedTuple):
    """The result of a unit: a record or an error."""

    unit: WorkUnit
    record: UnitRecord | None
    error: UserError | None = None


class Progress:
    """A progress bar over the text of all units or, with `max_tokens`, over the tokens. `records` are of finished units."""

    def __init__(self, config: ConvertConfig, units: list[WorkUnit], records: Records):
        self.units, self._limit, self._tokens = units, config.max_tokens, 0
        size = sum(unit.bytes for unit in units)
        text = f"{len(units)} work unit{'s' * (len(units) > 1)} ({size / 1e6:,.1f} MB)"
        print(f"converting {text} to {config.output}: MDS shards of rows of {config.sequence_length} tokens")
        if records:
            tqdm.write(f"{len(records)} of {len(units)} work units were finished before and are kept")
        kept = sum(unit.bytes for unit in units if unit.name in records)
        if self._limit is not None:
            kept = sum(record["splits"]["train"]["tokens"] for record in records.values())
        unit = "B" if self._limit is None else "tok"
        self._bar = tqdm(total=self._limit or size, initial=kept, unit=unit, unit_scale=True, smoothing=0.05)

    def close(self) -> None:
        self._bar.close()

    def add(self, tokens: int, size: int) -> None:
        if size and not self._tokens:
            self._bar.unpause()  # the rate excludes the workers' start-up time
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._tokens:,} tokens", refresh=False)
        self._bar.update(size if self._limit is None else tokens)


class UnitWorker:
    """Converts units, in this process or in a worker."""

    def __init__(self, context: ConversionContext, report: Report):
        # Pickling loses this setting, which encodes names of special tokens in a text as plain text.
        context.tokenizer.tokenizer.encode_special_tokens = True
        self._context, self._report = context, report

    @cached_property
    def _encoder(self) -> BulkEncoder:
        # Made with the first unit, whose result then says that this worker's machine has no gigatoken.
        return BulkEncoder(self._context.tokenizer, self._context.backend)

    def convert(self, unit: WorkUnit, max_tokens: int | None) -> UnitResult:
        """Convert a unit, and return an error instead of raising it."""
        try:
            return UnitResult(unit, convert_unit(self._context, self._encoder, unit, max_tokens, self._report))
        except UserError as error:
            return UnitResult(unit, None, error)
        except OSError as error:
            return UnitResult(unit, None, UserError(write_error_message(self._context.config.output, error)))


def _on_workers(group: WorkerGroup, retries: int, progress: Progress, jobs: Iterator[Job]) -> Iterator[UnitResult]:
    """Yield the results of units as they end. The next job is taken when a worker is idle.

    A unit whose worker dies is given to another worker, up to `retries` times.
    """
    lost, losses = deque[Job](), Counter[str]()
    while True:
        for slot in group.idle:
            if (job := lost.popleft() if lost else next(jobs, None)) is None:
                break
            slot.give(job, "convert", *job)
        if group.idle and not group.running:
            return
        for ended in group.wait(_REPORT_SECONDS):
            if ended.error is not None and not ended.lost:
                raise ended.error
            if not ended.lost:
                yield ended.value
                continue
            unit, _ = ended.job
            losses[unit.name] += 1
            if losses[unit.name] > retries:
                fault = f"its worker died {losses[unit.name]} times; is there memory for each worker (cluster.workers)?"
                yield UnitResult(unit, None, UserError(f"{unit.description}: {fault}"))
                continue
            tqdm.write(f"{unit.description}: its worker died; the work unit is given to another one")
            lost.append(ended.job)
        # Together, because `add` takes time that grows with the number of units.
        if reports := group.take_reports():
            progress.add(*map(sum, zip(*reports, strict=True)))


@contextmanager
def open_pool(
    context: ConversionContext, units: int, progress: Progress
) -> Iterator[Callable[[Iterator[Job]], Iterator[UnitResult]]]:
    """Yield a function that converts units and yields their results, here or on workers, as `cluster:` in the YAML says.

    `units` is their number. Raises a UserError if the cluster does not exist, or its nodes don't share the output and
    the sources.
    """
    config, cluster = context.config, context.config.cluster
    if units == 0 or (cluster.address is None and min(units, cluster.workers or available_cores()) == 1):
        # One unit after the other, each with a tokenizer that uses all cores.
        yield partial(starmap, UnitWorker(context, progress.add).convert)
        return
    paths = [config.output, *(file.path for unit in progress.units for file in unit.files)]
    with open_workers(cluster, paths, _ENVIRONMENT, (__name__,)) as group:
        size = min(units, cluster.workers or group.cpus)
        group.open(size, "cluster.workers", UnitWorker, context, group.make_report())
        yield partial(_on_workers, group, cluster.retries, progress)
