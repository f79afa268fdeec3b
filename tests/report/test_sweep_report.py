"""A sweep's report: its numbers against scipy and numpy, missing trials, and the same bytes from the same records."""

import csv
import io
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from biphasic.commands import main
from biphasic.report import sweep_report
from biphasic.report.scores import trial_table
from biphasic.report.sweep_report import report_files
from biphasic.storage import open_store
from biphasic.sweep.records import Cell, Grid, TrialRecord, write_grid, write_record
from helpers.sweeps import MNLI, MSMARCO, RATES, SEEDS, SST2, grid_of, records_of

NUMBERS = {name: number for number, name in enumerate(["sst2", "mnli-m", "mnli-mm", "msmarco", "nq"])}


def noisy(cell: Cell, name: str) -> tuple[float, float]:
    """The second rate is best; models differ by a little more than the noise."""
    noise = np.random.default_rng([int(cell.lr * 1e6), cell.seed, NUMBERS[name], ord(cell.model[0])])
    base = 0.7 + 0.05 * NUMBERS[name] + (0.04 if cell.lr == 2e-5 else 0) + (0.02 if cell.model == "b" else 0)
    return base + noise.normal(0, 0.001), base + noise.normal(0, 0.005) + 0.003 * cell.seed


def files_of(grid: Grid, records: dict[str, TrialRecord]) -> dict[str, str]:
    files = report_files(grid, trial_table(grid, records))
    return {name: content.decode() for name, content in files.items() if content and not name.endswith("png")}


def cells(page: str, heading: str, title: str) -> list[str]:
    """The cells of a table's line, by the first of them."""
    part = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    [line] = [line for line in part.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_numbers_of_the_main_table() -> None:
    grid = grid_of(tasks=(SST2, MNLI, MSMARCO))
    page = files_of(grid, records_of(grid, noisy))["report.md"]

    def tests(model: str, name: str) -> np.ndarray:
        return np.array([noisy(Cell(model, "", 2e-5, seed), name)[1] for seed in SEEDS])

    def cell_of(values: np.ndarray) -> str:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        return f"{100 * values.mean():.2f} ± {100 * half:.2f} ({len(values)})"

    for name in NUMBERS:
        _, _, a, b = cells(page, "Test scores", name)
        assert (a, b) == (cell_of(tests("a", name)), f"**{cell_of(tests('b', name)).partition(' (')[0]}** (3)")
    # MNLI's first test set counts.
    family = [(tests(model, "sst2") + tests(model, "mnli-m")) / 2 for model in "ab"]
    assert cells(page, "Test scores", "SC, mean")[2] == cell_of(family[0])
    by_rate = [np.mean([noisy(Cell("b", "", lr, seed), "nq")[0] for seed in SEEDS]) for lr in RATES]
    rates = [f"{100 * mean:.2f}" for mean in by_rate]
    assert cells(page, "Learning rates", "nq | b")[:7] == ["nq", "b", "2e-5", *rates]
    differences = page.split("## Differences between models\n", 1)[1]
    p = stats.ttest_rel(tests("a", "sst2"), tests("b", "sst2")).pvalue
    [line] = [line for line in differences.splitlines() if line.startswith("| sst2 |")][:1]
    assert f"| {p:.4f} |" in line or "< 0.0001" in line


def test_many_models_have_rows_instead_of_columns() -> None:
    grid = grid_of([f"m{number:02}" for number in range(sweep_report.MAX_SIDE_BY_SIDE)], tasks=(SST2, MNLI))
    wide = files_of(grid, records_of(grid, noisy))["report.md"]
    assert cells(wide, "Test scores", "mnli-m")[0:2] == ["mnli-m", "accuracy"]
    more = grid_of([*grid.models, "n"], tasks=(SST2, MNLI))
    high = files_of(more, records_of(more, noisy))["report.md"]
    assert cells(high, "Test scores", "metric") == ["metric", "", *["accuracy"] * 3]
    column = [cells(wide, "Test scores", name)[2].replace("*", "") for name in ("SC, mean", "sst2", "mnli-m", "mnli-mm")]
    assert [cell.replace("*", "") for cell in cells(high, "Test scores", "m00")[1:]] == column


def test_a_legend_of_many_models_leaves_room_for_the_panels() -> None:
    grid = grid_of([f"m{number:03}" for number in range(150)], rates=RATES[:2], seeds=(0,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if the axes have no room
        files = report_files(grid, trial_table(grid, records_of(grid, noisy)))
    assert files["learning-rates.png"]


def test_a_missing_score_is_not_zero() -> None:
    grid = grid_of(models=("a", "b", "c"), tasks=(SST2, MNLI))
    complete = records_of(grid, noisy)
    records = {
        trial: record
        for trial, record in complete.items()
        if record.cell.model == "a" or (record.cell.model == "b" and (record.cell.task, record.cell.seed) != ("mnli", 2))
    }
    files = files_of(grid, records)
    page = files["report.md"]
    assert cells(page, "Test scores", "sst2")[4] == "missing"
    assert "(2 of 3, rate open)" in cells(page, "Test scores", "mnli-m")[3]
    assert "(2 of 3, rate open)" in cells(page, "Test scores", "SC, mean")[3]
    assert cells(page, "Test scores", "SC, mean")[4] == "missing"
    # An incomplete mean is not the best.
    assert "**" not in cells(page, "Test scores", "mnli-m")[3]
    assert f"{len(complete) - len(records)} trials are missing" in page
    rows = list(csv.DictReader(io.StringIO(files["results.csv"])))
    absent = [row for row in rows if row["status"] == "missing"]
    assert absent
    assert all(row["validation"] == row["test"] == "" for row in absent)
    table = {(row["model"], row["test_set"]): row for row in csv.DictReader(io.StringIO(files["table.csv"]))}
    assert table["c", "sst2"]["score"] == ""
    assert float(table["a", "sst2"]["score"]) == pytest.approx(
        np.mean([noisy(Cell("a", "", 2e-5, seed), "sst2")[1] for seed in SEEDS])
    )


def test_a_seed_that_failed_at_the_only_rate() -> None:
    grid = grid_of(("a", "b"), rates=(1e-5,))
    files = files_of(grid, records_of(grid, lambda cell, name: None if cell.seed == 2 and cell.model == "a" else (0.5, 0.6)))
    assert cells(files["report.md"], "Test scores", "sst2")[2:] == ["60.00 ± 0.00 (2 of 3)", "60.00 ± 0.00 (3)"]
    assert cells(files["report.md"], "Learning rates", "sst2 | a")[2] == "1e-5"
    table = {row["model"]: row for row in csv.DictReader(io.StringIO(files["table.csv"])) if row["test_set"]}
    assert [(row["settled"], row["complete"]) for row in table.values()] == [("True", "False"), ("True", "True")]


def test_failures_are_listed_in_a_line() -> None:
    grid = grid_of()
    records = records_of(grid, lambda cell, name: None if cell.lr == 1e-4 else noisy(cell, name))
    page = files_of(grid, records)["report.md"]
    lines = page.split("## Failures\n", 1)[1].splitlines()
    assert sum(r"ValueError: a \| b" in line for line in lines) == 6
    assert "| a | sst2 | 1e-4 | 0 |" in page
    assert "more" not in "".join(line for line in lines if line.startswith("| a"))
    assert cells(page, "Learning rates", "sst2 | a")[2] == "2e-5"
    assert cells(page, "Learning rates", "sst2 | a")[3 + RATES.index(1e-4)] == "missing"


def test_a_task_without_a_test_set() -> None:
    grid = grid_of(tasks=(SST2, MNLI))
    records = {
        trial: replace(record, results=tuple(replace(r, test=None if r.name == "sst2" else r.test) for r in record.results))
        for trial, record in records_of(grid, noisy).items()
    }
    page = files_of(grid, records)["report.md"]
    assert cells(page, "Test scores", "sst2")[2:] == ["missing"] * 2
    assert cells(page, "Differences between models", "sst2 | a")[3:6] == ["missing"] * 3
    assert cells(page, "Learning rates", "sst2 | a")[2] == "2e-5"
    assert "missing" not in cells(page, "Test scores", "mnli-m")
    # A mean over the family's other tasks would not be the family's.
    assert cells(page, "Test scores", "SC, mean")[2:] == ["missing"] * 2


def test_no_records_one_seed_and_an_empty_grid() -> None:
    grid = grid_of()
    page = files_of(grid, {})["report.md"]
    assert cells(page, "Test scores", "sst2")[2:] == ["missing", "missing"]
    one = grid_of(seeds=(0,))
    page = files_of(one, records_of(one, noisy))["report.md"]
    a = noisy(Cell("a", "", 2e-5, 0), "sst2")[1]
    assert cells(page, "Test scores", "sst2")[2] == f"{100 * a:.2f} (1)"
    files_of(Grid((), (), (), (), {}, 0), {})


def test_reports_of_the_same_records_have_the_same_bytes(tmp_path: Path) -> None:
    """Another process, another hash seed, records written in another order."""
    grid = grid_of(tasks=(SST2, MNLI, MSMARCO))
    records = list(
        records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (1e-4, 1) else noisy(cell, name)).items()
    )
    reports = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        random.Random(str(folder.name)).shuffle(records)
        for _, record in records:
            write_record(open_store(str(folder)), record)
        write_grid(open_store(str(folder)), grid)
        if not reports:
            assert main(["report", str(folder)]) == 0
        else:
            command = [sys.executable, "-m", "biphasic", "report", "."]
            ran = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "1"}, cwd=folder)
            assert ran.returncode == 0, ran.stderr
        reports.append({file.name: file.read_bytes() for file in (folder / "report").iterdir()})
    assert reports[0].keys() == reports[1].keys() >= {"report.md", "results.csv", "table.csv", "learning-rates.png"}
    for name, content in reports[0].items():
        assert content == reports[1][name], name


def test_the_drawn_points_are_the_means_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each model: rates from the lowest, the band from the worst to the best seed."""
    figures: list[Figure] = []
    monkeypatch.setattr(sweep_report, "png", lambda figure: figures.append(figure) or b"")
    grid = grid_of(("610m-clm-42k-1000", "610m-clm-42k"))
    records = records_of(grid, noisy)
    files_of(grid, {trial: record for trial, record in records.items() if trial != "610m-clm-42k.sst2.1e-05.2"})
    [[rates]] = (figure.axes for figure in figures)

    def tests(lr: float) -> list[float]:
        return [100 * noisy(Cell("6", "", lr, seed), "sst2")[1] for seed in SEEDS]

    assert rates.get_title() == "sst2, accuracy" and rates.get_xscale() == "log"
    line = rates.get_lines()[0]
    assert list(line.get_xdata()) == list(RATES)
    assert list(line.get_ydata()) == pytest.approx([np.mean(tests(lr)) for lr in RATES])
    band, markers, _, incomplete = rates.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx(
        (min(map(min, map(tests, RATES))), max(map(max, map(tests, RATES))))
    )
    assert [tuple(face[:3]) == (1, 1, 1) for face in incomplete.get_facecolors()] == [True, False, False, False]
    assert not any(tuple(face[:3]) == (1, 1, 1) for face in markers.get_facecolors())


def test_records_of_other_grids_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another sweep with the same output, or of machines whose folders were merged: the report is of the last grid."""
    folder, grid, other = open_store(str(tmp_path / "sweep")), grid_of(("a",), seeds=(0,)), grid_of(("a",), seeds=(1, 2))
    for record in (*records_of(other, noisy).values(), *records_of(grid, noisy).values()):
        write_record(folder, record)
    write_grid(folder, grid)
    for place, line in (
        ("sweep", "\n8 records in trials/ are not of this grid ("),
        ("", "- sweep: 8 records in trials/ are "),
    ):
        assert main(["report", str(tmp_path / place)]) == 0
        assert line in capsys.readouterr().out
    write_grid(folder, grid_of(("a",)))
    assert main(["report", str(tmp_path / "sweep")]) == 0
    assert "are not of this grid" not in capsys.readouterr().out


def test_failures_that_the_sweep_does_not_run_again_are_not_counted() -> None:
    """Trials of another grid in the same output, at rates that the other seeds don't run."""
    grid = grid_of(models=("a",), rate_seeds=1)
    records = records_of(grid, lambda cell, _: (cell.lr, cell.lr) if cell.seed == 0 or cell.lr == RATES[-1] else None)
    page = files_of(grid, records)["report.md"]
    assert "## Failures\n\nNone.\n" in page


def test_a_folder_that_is_not_a_sweeps_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "expected a sweep's output (with sweep.json) or a study's folder" in capsys.readouterr().err
    grid = grid_of()
    write_grid(open_store(str(tmp_path)), grid)
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / f"{next(iter(grid.trials))}.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a trial's record" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "can't be read" in capsys.readouterr().err
