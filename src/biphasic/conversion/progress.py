"""Show a conversion's progress bar, log a line for each work unit, and describe the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.sources import describe_unread
from biphasic.conversion.work_units import UnitRecord, WorkUnit


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: a record or a fault. A damaged file does not stop the other units."""

    unit: WorkUnit
    record: UnitRecord | None = None
    fault: str = ""
    damaged_file: bool = False


class Progress:
    """A progress bar over the tokens of all units. The total is estimated from the text converted so far."""

    def __init__(
        self, config: ConvertConfig, units: list[WorkUnit], records: dict[str, UnitRecord], log: Callable[[str], None]
    ):
        self.config, self.units, self.log = config, units, log
        self.records = dict(records)
        self.tokens = self.bytes = 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        size = sum(unit.bytes for unit in self.units) / 1e6
        text = f"{len(self.units)} work unit{'s' * (len(self.units) > 1)} ({size:,.1f} MB)"
        rows = f"MDS shards of rows of {self.config.sequence_length} tokens"
        print(f"converting {text} to {self.config.output}: {rows}")
        if self.records:
            self.print_line(f"{len(self.records)} of {len(self.units)} work units were finished before and are kept")
        finished = sum(_tokens(record) for record in self.records.values())
        self._bar = tqdm(desc="tokens", unit="tok", unit_scale=True, smoothing=0.05, initial=finished)
        return self

    def __exit__(self, *_: object) -> None:
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
        self.records[result.unit.name] = record
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
        from tqdm import tqdm

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


def _tokens(record: dict[str, Any]) -> int:
    return sum(split["tokens"] for split in record["splits"].values())


def describe_record(output: str, record: dict[str, Any]) -> str:
    """Return the counts of a finished conversion's record as text."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {split['shards']:,} shards, "
        f"{split['bytes'] / 1e6:,.1f} MB"
        for name, split in record["splits"].items()
    ]
    documents = record["documents"]
    remarks = [f"{documents['filtered']:,} left out by filters"] if documents["filtered"] else []
    remarks += [f"{count:,} skipped ({kind})" for kind, count in documents["skipped"].items()]
    remarks += [f"{documents['repeated']:,} with the id of an earlier one (kept)"] if documents["repeated"] else []
    if remarks:
        lines.append(f"documents: {documents['read']:,} read, {', '.join(remarks)}")
    unread = record["source"]["unread"]
    lines += [f"not read: {describe_unread(unread)}"] if unread else []
    lines += [f"left out: {message}" for message in record["source"]["left_out"]]
    tokens = max(sum(split["tokens"] for split in record["splits"].values()), 1)
    stored = sum(split["bytes"] for split in record["splits"].values())
    lines.append(
        f"{stored / tokens:.2f} bytes stored a token, {record['text_bytes'] / tokens:.2f} bytes of text a token, "
        f"{tokens / max(record['cpu_seconds'], 1e-9):,.0f} tokens/s a core"
    )
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s"])
