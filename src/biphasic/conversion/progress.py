"""Show a conversion's progress bar, and log a line for each work unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.pool import UnitResult
from biphasic.conversion.work_units import UnitRecord, WorkUnit


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
        planned, read = (
            sum(unit.bytes for unit in finished),
            sum(self.records[unit.name]["text_bytes"] for unit in finished),
        )
        text = sum(unit.bytes for unit in self.units) * (read / planned if planned and read else 1)
        tokens = round(text * self.tokens / max(self.bytes, 1))
        return tokens if self.config.max_tokens is None else min(tokens, self.config.max_tokens)


def _tokens(record: dict[str, Any]) -> int:
    return sum(split["tokens"] for split in record["splits"].values())
