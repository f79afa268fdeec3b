"""Run a conversion's work units in this process, or on workers of this machine or a Ray cluster, and show the progress."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap

from tqdm import tqdm

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.output import write_error_message
from biphasic.conversion.source_files import DamagedFileError
from biphasic.conversion.work_units import ConversionContext, UnitRecord, WorkUnit
from biphasic.conversion.worker import Report, convert_unit
from biphasic.errors import UserError
from biphasic.limits import available_cores
from biphasic.workers import open_workers
from biphasic.workers.group import WorkerGroup

_REPORT_SECONDS = 0.5
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
_MODULES = ("biphasic.conversion.pool", "streaming")
"""Modules that workers import."""


Job = tuple[WorkUnit, int | None]
"""A unit, and its limit of training tokens."""


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: a record or a fault. A damaged file does not stop the other units."""

    unit: WorkUnit
    record: UnitRecord | None = None
    fault: str = ""
    damaged_file: bool = False


class Progress:
    """A progress bar over the tokens of all units, and a line in the log for each unit.

    The total is estimated from the text converted so far. The caller adds the records of finished units to `records`.
    """

    def __init__(
        self, config: ConvertConfig, units: list[WorkUnit], records: dict[str, UnitRecord], log: Callable[[str], None]
    ):
        self.config, self.units, self.records, self.log = config, units, records, log
        self.tokens = self.bytes = 0
        size = sum(unit.bytes for unit in self.units) / 1e6
        text = f"{len(self.units)} work unit{'s' * (len(self.units) > 1)} ({size:,.1f} MB)"
        rows = f"MDS shards of rows of {self.config.sequence_length} tokens"
        print(f"converting {text} to {self.config.output}: {rows}")
        if self.records:
            self.print_line(f"{len(self.records)} of {len(self.units)} work units were finished before and are kept")
        finished = sum(_tokens(record) for record in records.values())
        self._bar = tqdm(desc="tokens", unit="tok", unit_scale=True, smoothing=0.05, initial=finished)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def add(self, tokens: int, size: int) -> None:
        """Add tokens and text bytes that workers have converted."""
        if not size:
            return
        if not self.bytes:
            # The rate excludes the workers' start-up time.
            self._bar.unpause()
        self.tokens += tokens
        self.bytes += size
        self._bar.total = max(self._estimate(), self._bar.n + tokens)
        self._bar.update(tokens)

    def finished(self, result: UnitResult) -> None:
        """Log the result of a unit."""
        record = result.record
        if record is None:
            self.print_line(result.fault)
            return
        tokens, seconds = _tokens(record), max(record["seconds"], 1e-9)
        documents = sum(split["documents"] for split in record["splits"].values())
        self.log(
            f"{result.unit.name} {result.unit.description}: {documents:,} documents, {tokens:,} tokens, "
            f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s ({len(self.records)} of {len(self.units)})"
        )
        for line in [*record["damaged"], *record["documents"]["examples"]]:
            self.print_line(f"skipped: {line}")

    def print_line(self, line: str) -> None:
        """Print a line above the bar and log it."""
        self.log(line)
        tqdm.write(line)

    def _estimate(self) -> int:
        """Estimate the tokens of all units from the text converted so far."""
        finished = [unit for unit in self.units if unit.name in self.records]
        planned = sum(unit.bytes for unit in finished)
        read = sum(self.records[unit.name]["text_bytes"] for unit in finished)
        text = sum(unit.bytes for unit in self.units) * (read / planned if planned and read else 1)
        tokens = round(text * self.tokens / max(self.bytes, 1))
        return tokens if self.config.max_tokens is None else min(tokens, self.config.max_tokens)


def _tokens(record: UnitRecord) -> int:
    return sum(split["tokens"] for split in record["splits"].values())


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


def _convert_on_workers(
    group: WorkerGroup, retries: int, progress: Progress, jobs: Iterator[Job]
) -> Iterator[UnitResult]:
    """Yield the results of units as they end. The next job is taken when a worker is idle.

    A unit whose worker dies is given to another worker, up to `retries` times. Raises a UserError if workers repeatedly
    die while they start.
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
                yield UnitResult(unit, fault=f"{unit.description}: {fault}")
                continue
            progress.print_line(f"{unit.description}: its worker died; the work unit is given to another one")
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
    with open_workers(cluster, paths, _ENVIRONMENT, _MODULES) as group:
        size = min(units, cluster.workers or group.cpus)
        group.open(size, "cluster.workers", UnitWorker, context, group.make_report())
        yield partial(_convert_on_workers, group, cluster.retries, progress)
