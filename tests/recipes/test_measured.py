"""The recipes' results: the page, and the check of a new run."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes"))
measured: Any = import_module("measured")
ROW: dict[str, Any] = {
    "command": "make mini",
    "commit": "0123456789abcdef",
    "date": "2026-01-31",
    "hardware": "2 cores | x86",
    "hours": 0.75,
    "cost_dollars": None,
    "mfu": None,
    "tokens_per_second": {"value": 15000, "file": "run/metrics.jsonl", "key": "throughput/mlm/tokens_per_second"},
    "losses": {
        "MLM, validation": {"value": 3.25, "tolerance": 0.05, "file": "run/metrics.jsonl", "key": "metrics/mlm/loss"}
    },
    "scores": {"SC": {"value": 0.8, "tolerance": 0.01, "file": "report/groups.json", "key": "/610m~1a/SC"}},
}


def write_recipe(folder: Path, **changes: Any) -> Path:
    recipe = folder / "recipes" / "mini"
    recipe.mkdir(parents=True)
    (recipe / "results.json").write_text(json.dumps({**ROW, **changes}), encoding="utf-8")
    return recipe


def write_run(folder: Path, loss: float = 3.25, score: Any = 0.8) -> Path:
    run = folder / "run"
    (run / "run").mkdir(parents=True)
    (run / "report").mkdir()
    lines = [
        {"batch": 1, "time": 1, "loss/train/total": 9.0, "metrics/mlm/loss": 9.0},
        {"batch": 2, "time": 1, "metrics/mlm/loss": loss},
    ]
    (run / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run / "report" / "groups.json").write_text(json.dumps({"610m/a": {"SC": score}}), encoding="utf-8")
    return run


def test_the_committed_page_is_what_the_command_gives() -> None:
    page = (ROOT / "recipes" / "RESULTS.md").read_bytes()
    assert measured.results_page(ROOT / "recipes") == page, "run: python recipes/measured.py"


def test_the_page_has_a_row_for_each_recipe(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    nested = tmp_path / "recipes" / "mini" / "runs"
    nested.mkdir()
    (nested / "results.json").write_text("{}")  # not a recipe's
    page = measured.results_page(tmp_path / "recipes").decode()
    assert "| mini | 2026-01-31 | `0123456` | 2 cores \\| x86 | 0.75 | n/a | 15,000 | n/a |" in page
    assert "## mini\n\n    make mini\n" in page
    assert "| loss | MLM, validation | 3.2500 | ± 0.05 |\n| score | SC | 0.8000 | ± 0.01 |\n" in page


def test_a_run_within_the_tolerances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_recipe(tmp_path), write_run(tmp_path, loss=3.3, score=0.79)
    assert measured.main([str(recipe), str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]] == [
        ["MLM, validation", "3.25", "± 0.05", "3.3", "ok"],
        ["SC", "0.8", "± 0.01", "0.79", "ok"],
    ]
    assert lines[-1] == "0 of 2 numbers are not within the tolerance"


@pytest.mark.parametrize(
    ("loss", "score", "verdicts"),
    [
        (3.31, 0.8, ["differs", "ok"]),
        (3.19, 0.8, ["differs", "ok"]),
        (float("nan"), 0.8, ["missing", "ok"]),
        (3.25, "0.8", ["ok", "missing"]),
        (3.25, None, ["ok", "missing"]),
    ],
)
def test_a_run_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float, score: Any, verdicts: list[str]
) -> None:
    recipe, run = write_recipe(tmp_path), write_run(tmp_path, loss, score)
    assert measured.main([str(recipe), str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:4]] == verdicts
    assert lines[-1] == "1 of 2 numbers are not within the tolerance"


def test_an_empty_folder_is_missing_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    assert measured.main([str(recipe), str(run)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{run}: doesn't exist\n")
    run.mkdir()
    assert measured.main([str(recipe), str(run)]) == 1
    assert "2 of 2 numbers are not within the tolerance" in capsys.readouterr().out


def test_rounding_does_not_exceed_a_tolerance() -> None:
    assert measured.verdict(0.3, 0.1, 0.4) == "ok"
    assert [measured.verdict(0.3, 0.0, value) for value in (0.3, 0.3001)] == ["ok", "differs"]


def test_a_new_row_has_the_values_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_recipe(tmp_path), write_run(tmp_path, loss=3.5, score=0.9)
    arguments = [str(recipe), str(run), "--record", "4 cores", "--hours", "0.5"]
    assert measured.main(arguments) == 2
    missing = "has no tokens_per_second (run/metrics.jsonl: throughput/mlm/tokens_per_second)\n"
    assert capsys.readouterr().err == f"{run}: {missing}"
    with (run / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"batch": 2, "time": 1, "throughput/mlm/tokens_per_second": 20_000.0}) + "\n")
    assert measured.main(arguments) == 0
    row = json.loads((recipe / "results.json").read_text())
    assert (row["hardware"], row["hours"], row["command"]) == ("4 cores", 0.5, "make mini")
    assert (row["losses"]["MLM, validation"]["value"], row["scores"]["SC"]["value"]) == (3.5, 0.9)
    assert row["tokens_per_second"]["value"] == 20_000 and row["date"] != ROW["date"] and row["commit"] != ROW["commit"]
