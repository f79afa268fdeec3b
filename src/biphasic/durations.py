"""Durations, which YAMLs give as a number and one of Composer's time units, and the progress of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

UNITS = {"ba": "batches", "sp": "rows", "tok": "tokens", "ep": "epochs", "dur": "share of max_duration"}
_REFUSED = {
    "sec": "wall-clock time would make a resumed run another run",
    "it": "Biphasic sets no iteration length",
}
_PATTERN = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]+)\s*$")
EXPECTED = "a number and a unit, such as 21000ba (batches), 0.5dur, 50_000_000_000tok, 2ep or 1000000sp (rows)"


@dataclass(frozen=True)
class Duration:
    """A duration: `value` in `unit` (one of `UNITS`). `str` returns Composer's format, e.g. `21000ba`."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Parse a duration such as `21000ba`, `0.5dur` or `50_000_000_000tok`. Raises a ValueError."""
        if isinstance(text, Duration):
            return text
        match = _PATTERN.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"expected {EXPECTED}; got {text!r}")
        value, unit = float(match[1].replace("_", "")), match[2]
        if unit in _REFUSED:
            raise ValueError(f"the unit `{unit}` can't be used, since {_REFUSED[unit]}; expected {EXPECTED}")
        if unit not in UNITS:
            raise ValueError(f"no unit `{unit}`; expected {EXPECTED}")
        if value >= 2**63:
            raise ValueError(f"expected less than 2**63; got {text!r}")
        if unit == "dur":
            if value > 1:
                raise ValueError(f"expected a share of max_duration between 0dur and 1dur; got {text!r}")
        elif value != int(value):
            raise ValueError(f"expected a whole number of {UNITS[unit]}; got {text!r}")
        return cls(value, unit)

    def resolve(self, total: Duration, epoch: int | None = None) -> Duration:
        """Convert a share (`dur`) to the unit of `total`, rounded up; and epochs of `epoch` batches to batches, if given."""
        value, unit = (self.value * total.value, total.unit) if self.unit == "dur" else (self.value, self.unit)
        if unit == "ep" and epoch is not None:
            value, unit = value * epoch, "ba"
        # Rounding before ceil removes floating-point errors: 0.07 * 100 is 7.000000000000001 but must give 7 batches.
        return Duration(math.ceil(round(value, 6)), unit)

    def is_whole_of(self, total: Duration) -> bool:
        """Return False for a share of epochs that is not a number of epochs, and so can't be resolved as it is."""
        return self.unit != "dur" or total.unit != "ep" or not round(self.value * total.value, 6) % 1

    def __str__(self) -> str:
        return f"{self.value!r}".removesuffix(".0") + "dur" if self.unit == "dur" else f"{int(self.value)}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema  # only configurations need it

        # A separate format in JSON schemas, from which the reference is made.
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(str),
            metadata={"pydantic_js_functions": [lambda schema, handler: {"format": "length, such as `1000ba`"}]},
        )


def epoch_batches(state: Any) -> int | None:
    """Return the number of batches in an epoch of a Composer state's loader; None if it has no length."""
    return None if state.dataloader_len is None else int(state.dataloader_len)


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run at the start of a batch, summed over all ranks."""

    batches: int
    rows: int
    tokens: int
    epochs: int

    @classmethod
    def of(cls, time: Any) -> TrainingProgress:
        """Return the counts of a Composer `Timestamp`."""
        return cls(time.batch.value, time.sample.value, time.token.value, time.epoch.value)

    def in_unit(self, unit: str) -> int:
        return {"ba": self.batches, "sp": self.rows, "tok": self.tokens, "ep": self.epochs}[unit]

    def reached(self, when: Duration) -> bool:
        """Return whether `when` has been reached. `when` is not in `dur`."""
        return self.in_unit(when.unit) >= when.value

    def after(self, batches: int, shape: BatchShape) -> TrainingProgress:
        """Return the progress after `batches` more batches of one shape in the same epoch."""
        rows, tokens = self.rows + batches * shape.rows, self.tokens + batches * shape.size
        return TrainingProgress(self.batches + batches, rows, tokens, self.epochs)


@dataclass(frozen=True)
class BatchShape:
    """The size of a global batch."""

    rows: int
    row_length: int

    @property
    def size(self) -> int:
        return self.rows * self.row_length

    def in_unit(self, unit: str) -> int:
        return {"ba": 1, "sp": self.rows, "tok": self.size}[unit]


@dataclass(frozen=True)
class BatchShapes:
    """The sizes of a run's global batches. They convert durations before the data is read, as if no row had padding.

    `parts` are pairs of a first batch, ascending from 0, and the shape of the batches from there on.
    """

    parts: tuple[tuple[int, BatchShape], ...]

    def _part_of(self, duration: Duration) -> tuple[TrainingProgress, BatchShape, int]:
        """Return the start of the part in which `duration` ends, its shape, and what remains of `duration`."""
        start, left = TrainingProgress(0, 0, 0, 0), int(duration.value)
        for (first, shape), (end, _) in pairwise(self.parts):
            if left <= (end - first) * shape.in_unit(duration.unit):
                return start, shape, left
            left -= (end - first) * shape.in_unit(duration.unit)
            start = start.after(end - first, shape)
        return start, self.parts[-1][1], left

    def tokens(self, duration: Duration) -> int:
        """Convert a duration in batches, rows or tokens to tokens, including padding."""
        start, shape, left = self._part_of(duration)
        return start.tokens + left * shape.size // shape.in_unit(duration.unit)

    def batches(self, duration: Duration) -> int:
        """Return the first batch that begins at or after `duration` (in batches, rows or tokens)."""
        start, shape, left = self._part_of(duration)
        return start.batches - (-left // shape.in_unit(duration.unit))

    def batches_at(self, interval: Duration, start: int, end: int) -> Iterator[int]:
        """Yield the numbers of batches, between `start` and `end`, with which a multiple of an interval is reached.

        A multiple may lie within a batch, as in `checkpointing.save.interval_schedule`.
        """
        batch = start
        while True:
            passed = self.progress(batch).in_unit(interval.unit) // interval.value
            batch = self.batches(Duration((passed + 1) * interval.value, interval.unit))
            if batch >= end:
                return
            yield batch

    def not_before(self, a: Duration, b: Duration) -> bool:
        """Return whether no batch begins between `a` and a later `b`. Epochs can't be compared before the data is read."""
        if "ep" in (a.unit, b.unit):
            return a.unit == b.unit and a.value >= b.value
        return self.batches(a) >= self.batches(b)

    def progress(self, batches: int) -> TrainingProgress:
        """Return the progress at the start of a batch in the first epoch."""
        start, shape, left = self._part_of(Duration(batches, "ba"))
        return start.after(left, shape)


def recorded_shapes(config: Mapping[str, Any]) -> list[BatchShape]:
    """Return the size of each phase's batches, from a run's recorded configuration."""
    rows, length, shapes = config["global_batch_size"], config["data"]["sequence_length"], list[BatchShape]()
    for phase in config["objective"]["phases"]:
        rows = phase.get("global_batch_size") or rows
        length = (phase.get("data") or {}).get("sequence_length") or length
        shapes.append(BatchShape(rows, length))
    return shapes


def longest_row(config: Mapping[str, Any]) -> int:
    """Return the number of tokens in the longest row of any phase, from a run's recorded configuration."""
    return max(shape.row_length for shape in recorded_shapes(config))
