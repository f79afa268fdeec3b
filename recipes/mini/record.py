"""Write results.json of this recipe from a folder that run.sh has finished.

    python recipes/mini/record.py runs/mini --hardware "2 CPU cores"

Afterwards `python recipes/measured.py` writes recipes/RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raw_records import read_run

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store
from biphasic.training.metrics_file import parse_metrics

HERE = Path(__file__).parent
MODELS = ("1m-clm-2560", "1m-mlm40-2560", "1m-clm-1280-mlm40-2560")
"""Models whose losses and scores are recorded."""
SPEED = ("1m-mlm40-2560", "throughput/mlm/tokens_per_second")
LOSS_TOLERANCE, SCORE_TOLERANCE = 0.05, 0.05
"""Of another run on the same text: nats, and scores from 0 to 1. The scores are of five seeds and 583 to 800 examples."""


def results(folder: Path, hardware: str, commit: str) -> dict[str, Any]:
    """Return the recipe's row, from the files of a finished run."""
    groups: dict[str, dict[str, float]] = json.loads((folder / "study" / "report" / "groups.json").read_text())
    speed = _last(folder, *SPEED)
    return {
        "command": "recipes/mini/run.sh",
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "hardware": hardware,
        "hours": round(sum(read_run(folder).total_hours), 2),
        "cost_dollars": None,
        "tokens_per_second": speed and {"tolerance": None, **speed, "value": round(speed["value"])},
        "mfu": None,
        "losses": dict(_losses(folder)),
        "scores": {
            f"{model}: {group}": {
                "value": round(groups[model][group], 4),
                "tolerance": SCORE_TOLERANCE,
                "file": "study/report/groups.json",
                "key": f"/{model}/{group}",
            }
            for model in MODELS
            for group in groups[model]
        },
    }


def _losses(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for model in MODELS:
        for objective in ("clm", "mlm"):
            number = _last(folder, model, f"metrics/{objective}/loss")
            if number is not None:
                value = round(number["value"], 4)
                yield (
                    f"{model}: {objective.upper()}, validation",
                    {**number, "value": value, "tolerance": LOSS_TOLERANCE},
                )


def _last(folder: Path, model: str, key: str) -> dict[str, Any] | None:
    """Return the last value of a run's metric and its place; None if the run doesn't have it."""
    file = f"study/{model}/metrics.jsonl"
    entries = [entry for entry in parse_metrics((folder / file).read_text()) if key in entry]
    return {"value": entries[-1][key], "file": file, "key": key} if entries else None


def main(arguments: list[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Record the results of a run of the mini study.")
    parser.add_argument("folder", type=Path, help="the folder of run.sh")
    parser.add_argument("--hardware", required=True, help="in words, as in `2 CPU cores`")
    parser.add_argument("--commit", default="HEAD", help="the commit that was run; default: HEAD")
    options = parser.parse_args(arguments)
    command = ["git", "rev-parse", "--short=10", "--verify", f"{options.commit}^{{commit}}"]
    git = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    if git.returncode:
        print(f"--commit {options.commit}: {git.stderr.strip()}", file=sys.stderr)
        return 2
    try:
        row = results(options.folder, options.hardware, git.stdout.strip())
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    open_store(str(HERE)).write("results.json", json_bytes(row))
    print(HERE / "results.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
