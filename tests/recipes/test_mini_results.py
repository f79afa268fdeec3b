"""The tables of the mini study over its seeds, from scores that are known."""

import json
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.studies import RATES, SEEDS, STEP_SECONDS, facets_of_name, write_run, write_sweep
from helpers.sweeps import SST2
from helpers.tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes"))
measured: Any = import_module("measured")
MODELS = (
    "1m-clm-160", "1m-mlm40-160", "1m-clm-80-mlm40-160", "1m-clm-640", "1m-mlm40-640", "1m-mlm20-640",
    "1m-clm-320-mlm40-640", "1m-clm-320-mlm20-640", "1m-clm-dec640-mlm40-832", "1m-mlm40-640-320",
)  # fmt: skip
TASKS = ("types", "parameters", "questions", "retrieval")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    sys.path.insert(0, str(ROOT / "recipes" / "mini"))
    import results

    return results


@pytest.fixture(scope="module")
def raw(module: ModuleType) -> ModuleType:
    import raw_records

    return raw_records


def records_of(raw: ModuleType, seeds: tuple[int, ...] = (42, 1, 2)) -> Any:
    """CLM→MLM is 10 points better than MLM with every seed, within a point."""
    trials = []

    def add(seed: int, model: str, scores: list[float]) -> None:
        """Two fine-tuning seeds at the chosen rate, and one at a rate that is 8 points worse on validation."""
        for task in TASKS:
            for number, score in enumerate(scores):
                trials.append(raw.Trial(seed, model, task, 2e-3, number, 0.5, score, True))
            trials.append(raw.Trial(seed, model, task, 4e-3, 0, 0.42, 0.9, False))

    add(42, "untrained", [0.25, 0.25])
    for model in MODELS:
        gain = 0.1 if facets_of_name(model).objective == "clm-mlm" else 0.0
        for at, seed in enumerate(seeds):
            add(seed, model, [0.5 + gain + 0.01 * at + 0.001 * at * (gain > 0), 0.52 + gain + 0.01 * at])
    losses = [raw.Loss(42, "1m-mlm40-640", "mlm", 4.0), raw.Loss(1, "1m-mlm40-640", "mlm", 4.2)]
    return raw.Records(trials, losses, [raw.Hours("study", 1.5, 2.0), raw.Hours("seed1", 0.5, 0.25)])


def table(lines: list[str], title: str) -> list[list[str]]:
    start = next(at for at, line in enumerate(lines) if line.startswith(f"## {title}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def test_tables(module: ModuleType, raw: ModuleType) -> None:
    lines = module.tables(module.Results(records_of(raw)))
    initial, *main = table(lines, "Objectives by budget")
    assert [row[:2] for row in main] == [
        [tokens, name] for tokens in ("0.66 M", "2.62 M") for name in ("MLM", "CLM→MLM", "CLM")
    ]
    assert initial[:3] == ["0", "untrained", "25.00 ± 0.00"]
    assert main[0][2] == "52.00 ± 2.48", "over three pretraining seeds: 51, 52, 53; t(0.975, 2) / sqrt(3) = 2.484"
    assert main[3][-1] == "4.100" and main[0][-1] == ""
    assert [row[1] for row in table(lines, "Share of CLM")] == ["0%", "50%", "100%"] * 2
    assert [row[1] for row in table(lines, "Masking ratio")] == [
        "MLM, 20%", "MLM, 40%", "CLM→MLM, 20%", "CLM→MLM, 40%"
    ]  # fmt: skip
    assert table(lines, "Best minus worst of four")[0][:3] == ["0.66 M", "MLM", "8.00"]
    assert [row[:2] for row in table(lines, "Continued pretraining")] == [["3.41 M", "CLM"]]
    assert "- Pretraining steps: 2.00 hours of two cores" in lines and lines[-1].endswith("2.25 hours of two cores")


def test_differences_are_paired_by_pretraining_seed(module: ModuleType, raw: ModuleType) -> None:
    rows = table(module.tables(module.Results(records_of(raw))), "Differences")
    assert len(rows) == 2 * 3 * 4
    [row] = [row for row in rows if row[:3] == ["0.66 M", "CLM→MLM minus MLM", "`types`"]]
    assert row[3] == "+10.05 ± 0.12", "+10.00, +10.05, +10.10: the seeds' own levels cancel"
    assert row[4] == "< 0.0001" and row[5] != "1.0000"


def test_one_pretraining_seed(module: ModuleType, raw: ModuleType) -> None:
    """Intervals are over fine-tuning seeds, and differences have none."""
    lines = module.tables(module.Results(records_of(raw, (42,))))
    assert table(lines, "Objectives by budget")[1][2] == "51.00 ± 12.71"
    first = table(lines, "Differences")[0]
    assert first[1:] == ["CLM minus CLM→MLM", "`types`", "-10.00", "n/a", "n/a"]


def test_a_budget_with_one_seed_is_not_beside_those_with_three(
    module: ModuleType, raw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are in the tables of the first seed; in the figure it has a marker without an interval."""
    trials = [
        raw.Trial(42, model, task, 2e-3, seed, 0.5, 0.7, True)
        for model in ("1m-clm-2560", "1m-mlm40-2560", "1m-clm-1280-mlm40-2560")
        for task in module.TASKS
        for seed in (0, 1)
    ]
    records = records_of(raw)
    results = module.Results(replace(records, trials=[*records.trials, *trials]))
    lines = module.tables(results)
    assert {row[0] for row in table(lines, "Objectives by budget")} == {"0", "0.66 M", "2.62 M"}
    assert {row[0] for row in table(lines, "Differences")} == {"0.66 M", "2.62 M"}
    assert [row[:3] for row in table(lines, "Share of CLM")][-3:] == [
        ["10.49 M", share, "70.00 ± 0.00"] for share in ("0%", "50%", "100%")
    ]
    for axes in drawn(module, results, monkeypatch):
        alone = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
        assert [list(line.get_ydata()) for line in alone] == [[pytest.approx(70.0)]] * 3


def drawn(module: ModuleType, results: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the panels of the figure."""
    figures: list[Any] = []
    monkeypatch.setattr(module, "png", lambda figure: figures.append(figure) or b"")
    module.draw(results)
    return [axes for axes in figures[0].axes if axes.lines]


def test_the_figure_shows_each_objective_by_budget(
    module: ModuleType, raw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels = drawn(module, module.Results(records_of(raw)), monkeypatch)
    assert [axes.get_title(loc="left") or axes.get_title() for axes in panels] == list(TASKS)
    for axes in panels:
        curves = {container.get_label(): container.lines[0].get_ydata() for container in axes.containers}
        assert curves.keys() == set(module.MAIN)
        assert all(len(scores) == 2 for scores in curves.values())  # 160 and 640 batches
        gain = curves["CLM→MLM"] - curves["MLM"]
        assert gain == pytest.approx([10.05, 10.05], abs=0.1)
        assert [line.get_ydata()[0] for line in axes.lines if line.get_label() == "untrained"] == [25.0]


TWO_MODELS = {"study": ("210m-clm-400", "210m-mlm40-400"), "untrained": ("untrained",)}


def write_parts(folder: Path, parts: dict[str, tuple[str, ...]]) -> None:
    """Write the runs of each part's models, and their sweep."""
    for part, models in parts.items():
        for model in models:
            if model != "untrained":
                write_run(folder / part, model)
        write_sweep(folder / part / "sweep", models, lambda *_: (0.5, 0.5), (SST2,))


def test_the_files_of_a_run(module: ModuleType, raw: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models and the untrained one, a longer run of each seed."""
    monkeypatch.setattr(module, "RECORDS", tmp_path / "results")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "docs" / "picture.png")
    longer = {part: ("210m-clm-1600",) for part in ("long42", "long1")}
    write_parts(tmp_path / "run", {**TWO_MODELS, "seed1": ("210m-clm-400",), **longer})
    assert module.main([str(tmp_path / "run")]) == 0
    rows = (tmp_path / "results" / "trials.csv").read_text().splitlines()
    assert rows[0] == "pretraining_seed,model,task,lr,finetuning_seed,validation,test,chosen"
    trials = len(RATES) * len(SEEDS)
    assert Counter(tuple(row.split(",")[:2]) for row in rows[1:]) == {
        ("42", "210m-clm-400"): trials, ("42", "210m-mlm40-400"): trials, ("42", "untrained"): trials,
        ("1", "210m-clm-400"): trials, ("42", "210m-clm-1600"): trials, ("1", "210m-clm-1600"): trials,
    }  # fmt: skip
    assert Counter(row.split(",")[-1] for row in rows[1:]) == {
        "True": 6 * trials / len(RATES),
        "False": 6 * trials / len(RATES),
    }
    losses = (tmp_path / "results" / "losses.csv").read_text().splitlines()
    assert losses[0] == "pretraining_seed,model,objective,loss" and len(losses) == 1 + 5 * 2
    assert (tmp_path / "docs" / "picture.png").exists() and (tmp_path / "results" / "results.md").exists()
    pretraining, finetuning = raw.read_run(tmp_path / "run").total_hours
    assert (pretraining * 3600, finetuning * 3600) == pytest.approx(
        ((3 * 400 + 2 * 1600) * STEP_SECONDS, 6 * trials * 10.0 / 2)
    )
    written = {file.name: file.read_bytes() for file in (tmp_path / "results").iterdir()}
    (tmp_path / "results" / "results.md").unlink()
    assert module.main([]) == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "results").iterdir()} == written


def test_a_sweep_that_is_not_finished_is_refused(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "RECORDS", tmp_path / "results")
    write_parts(tmp_path / "run", TWO_MODELS)
    trials = sorted((tmp_path / "run" / "study" / "sweep" / "trials").iterdir())
    failed = json.loads(trials[0].read_text()) | {"status": "failed", "results": []}
    trials[0].write_text(json.dumps(failed))
    trials[1].unlink()
    assert module.main([str(tmp_path / "run")]) == 2
    message = f"{tmp_path}/run/study/sweep: 2 of its planned trials are missing or failed, e.g. {trials[0].stem}"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_folder_without_the_first_study(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "RECORDS", tmp_path / "results")
    write_parts(tmp_path / "run", {"seed1": ("210m-clm-400",), "long1": ("210m-clm-1600",)})
    assert module.main([str(tmp_path / "run")]) == 2
    assert "has no study and no untrained" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_a_folder_without_a_study(module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: has no study, expected a folder that recipes/mini/run.sh has finished\n"


RECORDS = ROOT / "recipes" / "mini" / "results"


def test_the_published_tables_are_those_of_the_published_records(module: ModuleType, raw: ModuleType) -> None:
    made = "\n".join(module.tables(module.Results(raw.read_written(RECORDS))))
    assert (RECORDS / "results.md").read_text() == made + "\n"
