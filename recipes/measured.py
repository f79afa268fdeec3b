"""Measured results of recipes: the page that lists them, and the check of a new run.

    python recipes/measured.py                           # writes recipes/RESULTS.md from recipes/*/results.json
    python recipes/measured.py recipes/NAME RUN          # a new run against the recipe's row; status 1 if it differs
    python recipes/measured.py recipes/NAME RUN --record "2 CPU cores" --hours 9.2      # writes the row from a new run

Each number in a results.json names its source in the run's folder, so that a new run can be compared:

    {"value": 3.214, "tolerance": 0.05, "file": "quickstart-pretrain/metrics.jsonl", "key": "metrics/mlm/loss"}
    {"value": 0.412, "tolerance": 0.02, "file": "scores/scores.json", "key": "/scores/encoder/ndcg_at_10"}

In a `.jsonl` file, `key` is a metric's name, whose last value counts; in a `.json` file, a JSON pointer (RFC 6901).
"""

import argparse
import datetime
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from biphasic.errors import UserError
from biphasic.report.formatting import NOT_AVAILABLE, escape, markdown_page, markdown_table
from biphasic.storage import json_bytes
from biphasic.training.metrics_file import parse_metrics

HERE = Path(__file__).parent


def results_page(recipes: Path) -> bytes:
    """Return the Markdown page with the results of all recipes in a folder."""
    results = {file.parent.name: json.loads(file.read_text()) for file in sorted(recipes.glob("*/results.json"))}
    body = [
        [escape(name), row["date"], f"`{row['commit'][:7]}`", escape(row["hardware"]), f"{row['hours']:.3g}",
         *(form.format(value) if value is not None else NOT_AVAILABLE for form, value in (
             ("{:,.2f}", row["cost_dollars"]), ("{:,.0f}", (row["tokens_per_second"] or {}).get("value")),
             ("{:.1%}", (row["mfu"] or {}).get("value"))))]
        for name, row in results.items()
    ]  # fmt: skip
    header = ["recipe", "date", "commit", "hardware", "hours", "cost ($)", "tokens/s", "MFU"]
    lines = [
        *["# Results of the recipes", ""],
        "Made by `python recipes/measured.py` from each recipe's `results.json`; every row was run.",
        "`python recipes/measured.py recipes/NAME RUN` compares a new run with its row (docs/report.md).",
        *["", *markdown_table(header, body)],
    ]
    for name, row in results.items():
        numbers = [
            [kind, escape(label), f"{number['value']:.4f}", f"± {number['tolerance']:g}"]
            for kind, of_kind in (("loss", row["losses"]), ("score", row["scores"]))
            for label, number in of_kind.items()
        ]
        lines += [
            f"## {name}",
            "",
            f"    {row['command']}",
            "",
            *markdown_table(["", "", "value", "tolerance"], numbers),
        ]
    return markdown_page(lines)


def check_run(recipe: Path, run: Path) -> dict[str, tuple[float, float, float | None]]:
    """Return the value and the tolerance of each of a recipe's losses and scores, and the new run's value.

    The last is None if the run's folder doesn't have it.
    """
    row = json.loads((recipe / "results.json").read_text())
    numbers = (row["losses"] | row["scores"]).items()
    return {name: (number["value"], number["tolerance"], _value(run, number)) for name, number in numbers}


def _value(run: Path, number: dict[str, Any]) -> float | None:
    """Return the run's value; None if the file or the key is missing, or the value is not a finite number."""
    try:
        text = (run / number["file"]).read_text()
        if number["file"].endswith(".jsonl"):
            value: Any = next(e[number["key"]] for e in reversed(parse_metrics(text)) if number["key"] in e)
        else:
            value = json.loads(text)
            for part in number["key"].removeprefix("/").split("/"):
                name = part.replace("~1", "/").replace("~0", "~")
                value = value[int(name) if isinstance(value, list) else name]
    except (FileNotFoundError, LookupError, TypeError, StopIteration):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def record_run(recipe: Path, run: Path, hardware: str, hours: float) -> None:
    """Write a new run's values into the recipe's row, with this checkout's commit. Raises a UserError if one is missing."""
    file = recipe / "results.json"
    row = json.loads(file.read_text())
    numbers = {**row["losses"], **row["scores"], "tokens_per_second": row["tokens_per_second"], "mfu": row["mfu"]}
    for name, number in numbers.items():
        if number is not None:
            number["value"] = _value(run, number)
            if number["value"] is None:
                raise UserError(f"{run}: has no {name} ({number['file']}: {number['key']})")
    command = ["git", "-C", str(HERE), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    file.write_bytes(json_bytes({**row, "commit": commit, "date": date, "hardware": hardware, "hours": hours}))


def verdict(expected: float, tolerance: float, value: float | None) -> str:
    """Compare a recipe's number with a new run's: `ok`, `differs` or `missing`."""
    if value is None:
        return "missing"
    # Rounding must not reject a difference that equals the tolerance.
    return "ok" if abs(value - expected) <= tolerance * (1 + 1e-9) + 1e-12 else "differs"


def main(arguments: list[str]) -> int:
    """Write the page, compare a run with a recipe's row, or write the row. Exit status 2 when a file is missing."""
    parser = argparse.ArgumentParser(description="Measured results of recipes.")
    parser.add_argument("recipe", type=Path, nargs="?", help="its folder; without it, RESULTS.md is written")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a new run")
    parser.add_argument("--record", metavar="HARDWARE", help="write the recipe's row, of this hardware in words")
    parser.add_argument("--hours", type=float, help="with --record: how long the run took")
    options = parser.parse_args(arguments)
    if options.recipe is None:
        (HERE / "RESULTS.md").write_bytes(results_page(HERE))
        return 0
    if options.run is None or (options.record is None) != (options.hours is None):
        parser.error("expected RECIPE RUN, and --record with --hours")
    try:
        if not options.run.is_dir():
            raise UserError(f"{options.run}: doesn't exist")
        if not (options.recipe / "results.json").is_file():
            raise UserError(f"{options.recipe}: has no results.json")
        if options.record is not None:
            record_run(options.recipe, options.run, options.record, options.hours)
            return 0
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    numbers = check_run(options.recipe, options.run)
    body = [
        [escape(name), f"{expected:.6g}", f"± {tolerance:g}", "" if value is None else f"{value:.6g}",
         verdict(expected, tolerance, value)]
        for name, (expected, tolerance, value) in numbers.items()
    ]  # fmt: skip
    print("\n".join(markdown_table(["", "recipe", "tolerance", "run", ""], body)))
    failed = [name for name, number in numbers.items() if verdict(*number) != "ok"]
    print(f"{len(failed)} of {len(numbers)} numbers are not within the tolerance")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
