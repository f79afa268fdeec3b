"""The measured results of recipes: `recipes/<name>/results.json`, the page made of them, and the check of a new run.

A number of a results file says where a run's folder has it, so that a new run can be compared:

    {"value": 3.214, "tolerance": 0.05, "file": "quickstart-pretrain/metrics.jsonl", "key": "metrics/mlm/loss"}
    {"value": 0.412, "tolerance": 0.02, "file": "scores/scores.json", "key": "/scores/encoder/ndcg_at_10"}

`key` is a metric's name in a `.jsonl` file, whose last value counts, and a JSON pointer (RFC 6901) in a `.json` file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from biphasic.config.base import Section
from biphasic.errors import UserError
from biphasic.report.formatting import NOT_AVAILABLE, escape, markdown_table
from biphasic.storage import Store, first_line, join, open_store
from biphasic.training.metrics_file import parse_metrics

RESULTS_FILE = "results.json"
PAGE = "RESULTS.md"


def _iso_date(text: str) -> str:
    date.fromisoformat(text)
    return text


def _source_file(text: str) -> str:
    if not text.endswith((".json", ".jsonl")) or text.startswith("/") or ".." in text.split("/"):
        raise ValueError(f"expected a .json or .jsonl file in the run's folder; got {text!r}")
    return text


class MeasuredNumber(Section):
    """A measured number, and where the run's folder has it."""

    value: float
    tolerance: Annotated[float, Field(ge=0)] | None = None
    """The largest difference of another run that counts as the same result. Null: the number is shown, not checked."""
    file: Annotated[str, AfterValidator(_source_file)]
    """A `.json` or `.jsonl` file, relative to the run's folder."""
    key: str
    """The number's JSON pointer, or its metric's name in a `.jsonl` file."""


class RecipeResults(Section):
    """What a recipe gave when it was run: one row of the page."""

    command: str
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,40}$")]
    date: Annotated[str, AfterValidator(_iso_date)]
    """The day of the run: `2026-11-22`."""
    hardware: str
    hours: Annotated[float, Field(gt=0)]
    cost_dollars: Annotated[float, Field(ge=0)] | None = None
    """Null: the machine has no hourly price."""
    tokens_per_second: MeasuredNumber | None = None
    mfu: MeasuredNumber | None = None
    losses: dict[str, MeasuredNumber] = {}
    """Losses in nats per predicted token, by name."""
    scores: dict[str, MeasuredNumber] = {}
    """Scores from 0 to 1, by name."""

    def numbers(self) -> Iterator[tuple[str, MeasuredNumber]]:
        """Yield all measured numbers with their names."""
        for name, number in (("tokens/s", self.tokens_per_second), ("MFU", self.mfu)):
            if number is not None:
                yield name, number
        yield from self.losses.items()
        yield from self.scores.items()


@dataclass(frozen=True)
class CheckedNumber:
    """A recipe's number beside a new run's."""

    name: str
    expected: MeasuredNumber
    value: float | None
    """The new run's number; None if the run's folder doesn't have it."""

    @property
    def verdict(self) -> str:
        """`ok`, `differs`, `missing`, or `not checked` for a number without a tolerance."""
        if self.expected.tolerance is None:
            return "not checked"
        if self.value is None:
            return "missing"
        # A difference that equals the tolerance is allowed, whatever rounding makes of it.
        allowed = self.expected.tolerance * (1 + 1e-9) + 1e-12
        return "ok" if abs(self.value - self.expected.value) <= allowed else "differs"


def read_results(recipe: str) -> RecipeResults:
    """Read a recipe's results file.

    Raises:
        UserError: the file can't be read or is wrong; the message lists all keys that are.
    """
    file = join(recipe, RESULTS_FILE)
    try:
        return RecipeResults.model_validate_json(open_store(recipe).read(RESULTS_FILE))
    except FileNotFoundError:
        raise UserError(f"{recipe}: has no {RESULTS_FILE}: no run of this recipe is recorded") from None
    except OSError as error:
        raise UserError(f"{file}: can't be read ({first_line(error)})") from None
    except ValidationError as error:
        lines = [f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise UserError("\n".join(lines)) from None


def results_page(recipes: str) -> str:
    """Return the page of all recipes' results, in Markdown.

    Args:
        recipes: the folder with a folder for each recipe.

    Raises:
        UserError: a results file is wrong.
    """
    files = [name.split("/") for name in open_store(recipes).list()]
    folders = sorted(parts[0] for parts in files if len(parts) == 2 and parts[1] == RESULTS_FILE)
    results = {folder: read_results(join(recipes, folder)) for folder in folders}
    lines = [
        *["# Results of the recipes", ""],
        f"Made by `biphasic report --results recipes` from each recipe's `{RESULTS_FILE}`; every row was run.",
        "`biphasic report --check recipes/NAME RUN` compares a new run with its row (docs/report.md).",
        "",
    ]
    if not results:
        return "\n".join([*lines, "It is empty: no run of a recipe is recorded yet.", ""])
    body = [
        [
            *(escape(name), result.date, f"`{result.commit[:7]}`", escape(result.hardware), f"{result.hours:.3g}"),
            NOT_AVAILABLE if result.cost_dollars is None else f"{result.cost_dollars:,.2f}",
            NOT_AVAILABLE if result.tokens_per_second is None else f"{result.tokens_per_second.value:,.0f}",
            NOT_AVAILABLE if result.mfu is None else f"{result.mfu.value:.1%}",
        ]
        for name, result in results.items()
    ]
    header = ["recipe", "date", "commit", "hardware", "hours", "cost ($)", "tokens/s", "MFU"]
    lines += markdown_table(header, body)
    for name, result in results.items():
        lines += [f"## {name}", "", f"    {result.command}", ""]
        body = [
            [kind, escape(label), f"{number.value:.4f}", _tolerance(number)]
            for kind, numbers in (("loss", result.losses), ("score", result.scores))
            for label, number in numbers.items()
        ]
        lines += markdown_table(["", "", "value", "tolerance"], body) if body else []
    return "\n".join(lines).rstrip() + "\n"


def check_run(results: RecipeResults, run: str) -> list[CheckedNumber]:
    """Return each number of a recipe's results beside that of a new run.

    Args:
        results: the recipe's results.
        run: the new run's folder or bucket prefix.

    Raises:
        UserError: a file of the run can't be read.
    """
    store = open_store(run)
    return [CheckedNumber(name, number, _number_of(store, number)) for name, number in results.numbers()]


def check_table(checked: list[CheckedNumber]) -> list[str]:
    """Return the lines of a table whose columns are aligned in a terminal."""
    rows = [("", "recipe", "tolerance", "run", "difference", "")]
    for number in checked:
        value, expected = number.value, number.expected.value
        measured, difference = ("", "") if value is None else (f"{value:.6g}", f"{value - expected:+.3g}")
        tolerance = _tolerance(number.expected)
        rows.append((number.name, f"{expected:.6g}", tolerance, measured, difference, number.verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if index in (0, 5) else cell.rjust(width)
                  for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _tolerance(number: MeasuredNumber) -> str:
    return "none" if number.tolerance is None else f"± {number.tolerance:g}"


def _number_of(run: Store, number: MeasuredNumber) -> float | None:
    """Return the run's number; None if its folder has no such file, key or finite number."""
    try:
        text = run.read(number.file).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{join(run.root, number.file)}: can't be read ({first_line(error)})") from None
    try:
        if number.file.endswith(".jsonl"):
            value: Any = next((e[number.key] for e in reversed(parse_metrics(text)) if number.key in e), None)
        else:
            value = _at_pointer(json.loads(text), number.key)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{join(run.root, number.file)}: can't be read ({first_line(error)})") from None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _at_pointer(content: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer; None if there is none."""
    for part in pointer.removeprefix("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(content, dict) and name in content:
            content = content[name]
        elif isinstance(content, list) and name.isdecimal() and int(name) < len(content):
            content = content[int(name)]
        else:
            return None
    return content
