"""Measured results of recipes: `recipes/<name>/results.json`, the page that lists them, and the check of a new run.

Each number in a results file names its source in the run's folder, so that a new run can be compared:

    {"value": 3.214, "tolerance": 0.05, "file": "quickstart-pretrain/metrics.jsonl", "key": "metrics/mlm/loss"}
    {"value": 0.412, "tolerance": 0.02, "file": "scores/scores.json", "key": "/scores/encoder/ndcg_at_10"}

In a `.jsonl` file, `key` is a metric's name, whose last value counts; in a `.json` file, a JSON pointer (RFC 6901).
"""

from __future__ import annotations

import datetime
import json
import math
from typing import Annotated, Any

from pydantic import Field, ValidationError

from biphasic.config.base import Section
from biphasic.errors import UserError, first_line
from biphasic.report.formatting import NOT_AVAILABLE, escape, markdown_page, markdown_table
from biphasic.storage import Store, join, open_store, user_errors
from biphasic.training.metrics_file import parse_metrics

RESULTS_FILE = "results.json"
PAGE = "RESULTS.md"


class MeasuredNumber(Section):
    """A measured number and its source in the run's folder."""

    value: float
    tolerance: Annotated[float, Field(ge=0)] | None = None
    """The largest difference at which another run counts as reproduced. Null: the number is shown but not checked."""
    file: Annotated[str, Field(pattern=r"^\w[^/]*(/\w[^/]*)*\.jsonl?$")]
    """A `.json` or `.jsonl` file, relative to the run's folder."""
    key: str
    """JSON pointer of the number, or the metric's name in a `.jsonl` file."""

    @property
    def shown_tolerance(self) -> str:
        """The tolerance as text."""
        return "none" if self.tolerance is None else f"± {self.tolerance:g}"

    def verdict(self, value: float | None) -> str:
        """Compare the number with a new run's; None if the run's folder doesn't have it."""
        if self.tolerance is None:
            return "not checked"
        if value is None:
            return "missing"
        # Rounding must not reject a difference that equals the tolerance.
        return "ok" if abs(value - self.value) <= self.tolerance * (1 + 1e-9) + 1e-12 else "differs"


class RecipeResults(Section):
    """The measured results of one recipe: a row of the page."""

    command: str
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,40}$")]
    date: datetime.date
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

    @property
    def numbers(self) -> dict[str, MeasuredNumber]:
        """All measured numbers by name."""
        speed = {"tokens/s": self.tokens_per_second, "MFU": self.mfu}
        return {name: number for name, number in speed.items() if number is not None} | self.losses | self.scores


def read_results(recipe: str) -> RecipeResults:
    """Read a recipe's results file. Raises a UserError that lists all invalid keys."""
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


def write_results_page(recipes: str) -> None:
    """Write `RESULTS.md` in the folder `recipes`. Raises a UserError if that fails."""
    page = results_page(recipes)
    with user_errors(f"{join(recipes, PAGE)}: can't be written"):
        open_store(recipes).write(PAGE, page)
    print(join(recipes, PAGE))


def results_page(recipes: str) -> bytes:
    """Return the Markdown page with the results of all recipes in a folder."""
    files = [name.split("/") for name in open_store(recipes).list()]
    folders = sorted(parts[0] for parts in files if len(parts) == 2 and parts[1] == RESULTS_FILE)
    results = {folder: read_results(join(recipes, folder)) for folder in folders}
    body = [
        [escape(name), result.date, f"`{result.commit[:7]}`", escape(result.hardware), f"{result.hours:.3g}",
         NOT_AVAILABLE if result.cost_dollars is None else f"{result.cost_dollars:,.2f}",
         NOT_AVAILABLE if result.tokens_per_second is None else f"{result.tokens_per_second.value:,.0f}",
         NOT_AVAILABLE if result.mfu is None else f"{result.mfu.value:.1%}"]
        for name, result in results.items()
    ]  # fmt: skip
    header = ["recipe", "date", "commit", "hardware", "hours", "cost ($)", "tokens/s", "MFU"]
    lines = [
        *["# Results of the recipes", ""],
        f"Made by `biphasic report --results recipes` from each recipe's `{RESULTS_FILE}`; every row was run.",
        "`biphasic report --check recipes/NAME RUN` compares a new run with its row (docs/report.md).",
        *["", *markdown_table(header, body)],
    ]
    for name, result in results.items():
        numbers = [
            [kind, escape(label), f"{number.value:.4f}", number.shown_tolerance]
            for kind, of_kind in (("loss", result.losses), ("score", result.scores))
            for label, number in of_kind.items()
        ]
        lines += [f"## {name}", "", f"    {result.command}", ""]
        lines += markdown_table(["", "", "value", "tolerance"], numbers)
    return markdown_page(lines)


def check_recipe(recipe: str, run: str) -> bool:
    """Print a recipe's numbers beside a new run's, and return whether all are within their tolerances."""
    results = read_results(recipe)
    checked = check_run(results, run)
    body = [
        [escape(name), f"{number.value:.6g}", number.shown_tolerance,
         *(["", ""] if value is None else [f"{value:.6g}", f"{value - number.value:+.3g}"]), number.verdict(value)]
        for name, (number, value) in checked.items()
    ]  # fmt: skip
    print(f"{run} against {recipe} (commit {results.commit[:7]}, {results.hardware})\n")
    print("\n".join(markdown_table(["", "recipe", "tolerance", "run", "difference", ""], body)))
    failed = sum(number.verdict(value) in ("differs", "missing") for number, value in checked.values())
    print(f"{failed} of {len(checked)} numbers are not within the tolerance" if failed else "within the tolerances")
    return not failed


def check_run(results: RecipeResults, run: str) -> dict[str, tuple[MeasuredNumber, float | None]]:
    """Return each number of a recipe with the new run's value; None if the run's folder doesn't have it."""
    store = open_store(run)
    return {name: (number, _number_of(store, number)) for name, number in results.numbers.items()}


def _number_of(run: Store, number: MeasuredNumber) -> float | None:
    """Return the run's value; None if the file or the key is missing, or the value is not finite."""
    try:
        text = run.read(number.file).decode(errors="replace")
        if number.file.endswith(".jsonl"):
            value: Any = next((e[number.key] for e in reversed(parse_metrics(text)) if number.key in e), None)
        else:
            value = json.loads(text)
            for part in number.key.removeprefix("/").split("/"):
                name = part.replace("~1", "/").replace("~0", "~")
                value = value[int(name) if isinstance(value, list) else name]
    except (FileNotFoundError, LookupError, TypeError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{join(run.root, number.file)}: can't be read ({first_line(error)})") from None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
