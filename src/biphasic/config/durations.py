"""Lengths of training, as a YAML writes them: a number and one of Composer's time units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

UNITS = {"ba": "batches", "sp": "rows", "tok": "tokens", "ep": "epochs", "dur": "share of max_duration"}
_REFUSED = {
    "sec": "wall-clock time would make a resumed run another run",
    "it": "Biphasic sets no iteration length",
}
_PATTERN = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]+)\s*$")
EXPECTED = "a number and a unit, such as 21000ba (batches), 0.5dur, 50_000_000_000tok, 2ep or 1000000sp (rows)"


@dataclass(frozen=True)
class Duration:
    """A length of training: `value` in `unit` (one of `UNITS`). Printed as Composer reads it, e.g. `21000ba`."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read `21000ba`, `0.5dur`, `50_000_000_000tok`, `2ep`, `4096sp`.

        Raises:
            ValueError: anything else, with what was expected.
        """
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
        if unit == "dur":
            if value > 1:
                raise ValueError(f"expected a share of max_duration between 0dur and 1dur; got {text!r}")
        elif value != int(value):
            raise ValueError(f"expected a whole number of {UNITS[unit]}; got {text!r}")
        return cls(value, unit)

    def of(self, whole: Duration) -> Duration:
        """Turn a share (`dur`) into the unit of `whole`, rounded up; leave everything else as it is."""
        if self.unit != "dur":
            return self
        # The rounding before ceil keeps 0.3dur of 10ba at 3 batches in spite of binary fractions.
        return Duration(math.ceil(round(self.value * whole.value, 6)), whole.unit)

    def __str__(self) -> str:
        return f"{self.value:g}dur" if self.unit == "dur" else f"{int(self.value)}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True)
class Elapsed:
    """How far a run has come: counts at the start of a batch, all ranks together."""

    batches: int
    rows: int
    tokens: int
    epochs: int

    def in_unit(self, unit: str) -> int:
        """The count in `unit` (`ba`, `sp`, `tok` or `ep`)."""
        return {"ba": self.batches, "sp": self.rows, "tok": self.tokens, "ep": self.epochs}[unit]

    def reached(self, when: Duration) -> bool:
        """Whether `when` (not a share) is now or past."""
        return self.in_unit(when.unit) >= when.value
