"""The recipes' results: the page, and the check of a new run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.report.recipe_results import MeasuredNumber, read_results, results_page

ROOT = Path(__file__).parents[2]
ROW: dict[str, Any] = {
    "command": "make mini",
    "commit": "0123456789abcdef",
    "date": "2026-01-31",
    "hardware": "2 cores | x86",
    "hours": 0.75,
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


def test_the_committed_page_is_what_the_command_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert results_page("recipes") == (ROOT / "recipes" / "RESULTS.md").read_bytes(), (
        "run: biphasic report --results recipes"
    )


def test_the_page_has_a_row_for_each_recipe(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    nested = tmp_path / "recipes" / "mini" / "runs"
    nested.mkdir()
    (nested / "results.json").write_text("{}")  # not a recipe's
    assert main(["report", "--results", str(tmp_path / "recipes")]) == 0
    page = (tmp_path / "recipes" / "RESULTS.md").read_text(encoding="utf-8")
    assert "| mini | 2026-01-31 | `0123456` | 2 cores \\| x86 | 0.75 | n/a | 15,000 | n/a |" in page
    assert "## mini\n\n    make mini\n" in page
    assert "| loss | MLM, validation | 3.2500 | ± 0.05 |\n| score | SC | 0.8000 | ± 0.01 |\n" in page


def test_a_run_within_the_tolerances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_recipe(tmp_path), write_run(tmp_path, loss=3.3, score=0.79)
    assert main(["report", "--check", str(recipe), str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:7]] == [
        ["tokens/s", "15000", "none", "", "", "not checked"],
        ["MLM, validation", "3.25", "± 0.05", "3.3", "+0.05", "ok"],
        ["SC", "0.8", "± 0.01", "0.79", "-0.01", "ok"],
    ]
    assert lines[-1] == "within the tolerances"


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
    assert main(["report", "--check", str(recipe), str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[-2].strip() for line in lines[5:7]] == verdicts
    assert lines[-1] == "1 of 3 numbers are not within the tolerance"


def test_an_empty_folder_is_missing_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    assert main(["report", "--check", str(recipe), str(tmp_path / "absent")]) == 1
    assert "2 of 3 numbers are not within the tolerance" in capsys.readouterr().out


def test_rounding_does_not_exceed_a_tolerance() -> None:
    expected = MeasuredNumber(value=0.3, tolerance=0.1, file="a.json", key="/a")
    assert expected.verdict(0.4) == "ok"
    exact = MeasuredNumber(value=0.3, tolerance=0.0, file="a.json", key="/a")
    assert [exact.verdict(value) for value in (0.3, 0.3001)] == ["ok", "differs"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "main"}, "commit: "),
        ({"date": "yesterday"}, "date: "),
        ({"hours": 0}, "hours: "),
        ({"speed": 3}, "speed: "),
        ({"losses": {"a": {"value": 1.0, "file": "../a.json", "key": "/a"}}}, "losses.a.file: "),
        ({"scores": {"a": {"value": 1.0, "tolerance": -1, "file": "a.json", "key": "/a"}}}, "scores.a.tolerance: "),
    ],
)
def test_a_wrong_results_file_is_reported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    recipe = write_recipe(tmp_path, **changes)
    with pytest.raises(UserError) as raised:
        read_results(str(recipe))
    assert f"{recipe}/results.json: {message}" in str(raised.value)


def test_a_recipe_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--check", str(tmp_path), str(tmp_path)]) == 2
    assert "has no results.json: no run of this recipe is recorded" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["a", "--results", "b"], ["--results", "b", "--out", "c"]])
def test_arguments_that_do_not_fit(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert "error: " in capsys.readouterr().err
