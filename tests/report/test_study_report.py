"""The report of a study's folder: all figures, what is left out and why, and the same bytes from the same records."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.report.statistics import mean_interval
from biphasic.report.study_folder import read_study
from biphasic.report.study_report import FIGURES, report_files
from biphasic.storage import open_store
from biphasic.sweep.records import Cell, write_grid, write_record
from helpers.buckets import bucket_for, upload_to
from helpers.studies import MODELS, SEEDS, score, write_run, write_study, write_sweep
from helpers.sweeps import MNLI, MSMARCO, SST2, grid_of, records_of
from main import main as run_main

EVALUATIONS = "evaluations are in no table: read"
NAMES = {*(figure.name for figure in FIGURES), "losses"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with its report."""
    folder = tmp_path_factory.mktemp("study")
    write_study(folder)
    assert main(["report", str(folder)]) == 0
    return folder


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))


def test_every_figure_is_drawn(study: Path) -> None:
    files = {file.name for file in (study / "report").iterdir()}
    pages = {"report.md", "report.html", "scores.csv", "groups.json", "differences.csv"}
    assert files == {f"{name}.{suffix}" for name in NAMES for suffix in ("png", "csv")} | pages
    page = (study / "report" / "report.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"![{name}]({name}.png)" in page
    assert page.endswith("## Left out\n\nNothing.\n")
    assert "| 610m-clm-400 | 610m | clm | n/a | 400 | 400 |" in page


def test_the_stage_of_a_study(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"defaults": "yamls/base/paper.yaml", "model.preset": "210m", "objective": {"phases": [{"name": "clm"}]}}
    content = {"job": "study", "folder": str(study), "base": base, "models": {"210m-clm-400": {}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    before = (study / "report" / "scores.csv").read_bytes()
    (study / "report" / "scores.csv").unlink()
    assert run_main([str(tmp_path / "study.yaml"), "--stage", "report"]) == 0
    assert (study / "report" / "scores.csv").read_bytes() == before
    assert run_main([str(tmp_path / "study.yaml"), "--stage", "report", "--limit", "1"]) == 2
    expected = "--limit is for --stage pretrain and --stage export and --stage finetune and --stage evaluate; "
    assert expected in capsys.readouterr().err


def test_the_stage_of_a_study_in_a_bucket_reads_its_own_models(tmp_path: Path, s3: Path) -> None:
    """Others have used the same local folder: a sweep and a run."""
    place, output = f"s3://{bucket_for(s3, 'report')}/study", tmp_path / "runs"
    base = {"defaults": "yamls/base/paper.yaml", "model.preset": "210m", "objective": {"phases": [{"name": "clm"}]}}
    content = {"job": "study", "folder": place, "output": str(output), "base": base, "models": {"210m-clm-400": {}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    write_sweep(tmp_path / "sweep", ["210m-clm-400"])
    upload_to(tmp_path / "sweep", f"{place}/sweep")
    write_run(output, "210m-clm-400")
    write_study(output / "quickstart", ["610m-clm-400"])
    write_sweep(output / "sweep", ["210m-clm-400", "610m-mlm40-400"])
    write_run(output, "610m-mlm40-400")
    for name in ("210m-clm-400", "610m-mlm40-400"):
        (output / "evaluate" / name).mkdir(parents=True)
        (output / "evaluate" / name / "scores.json").write_text("{}")
    assert run_main([str(tmp_path / "study.yaml"), "--stage", "report"]) == 0
    assert {row["model"] for row in rows_of(output / "report" / "scores.csv")} == {"210m-clm-400"}
    assert {row["run"] for row in rows_of(output / "report" / "losses.csv")} == {"210m-clm-400"}
    page = (output / "report" / "report.md").read_text()
    assert "610m-clm-400" not in page and "610m-mlm40-400" not in page
    assert f"\n- {EVALUATIONS} evaluate/210m-clm-400/scores.md, or compare two with biphasic compare.\n" in page


def test_numbers_of_a_figure(study: Path) -> None:
    rows = {(row["x"], row["group"], row["test_set"]): row for row in rows_of(study / "report" / "clm-share.csv")
            if row["line"] == "610m, 400 steps"}  # fmt: skip
    model = "610m-clm-100-mlm40-400"

    def tests(name: str) -> list[float]:
        return [score(Cell(model, "", 5e-5, seed), name)[1] for seed in SEEDS]

    cell = rows["25.0", "SC", "sst2"]
    interval = mean_interval(tests("sst2"))
    assert (float(cell["score"]), float(cell["half_width"])) == pytest.approx((interval.mean, interval.half))
    group = mean_interval([(a + b) / 2 for a, b in zip(tests("sst2"), tests("mnli-m"), strict=True)])
    cell = rows["25.0", "SC", ""]
    assert (float(cell["score"]), float(cell["half_width"])) == pytest.approx((group.mean, group.half))
    assert (cell["model"], cell["seeds"], cell["seeds_asked"], cell["settled"]) == (model, "3", "3", "True")
    assert json.loads((study / "report" / "groups.json").read_text())[model]["SC"] == pytest.approx(group.mean)
    sizes = rows_of(study / "report" / "objective-by-size.csv")
    assert [row["x"] for row in sizes[:4]] == ["210m", "610m", "210m", "610m"]


def test_differences_are_between_models_with_the_same_line_or_position(study: Path) -> None:
    rows = rows_of(study / "report" / "differences.csv")
    pairs = {(row["first"], row["second"]) for row in rows if row["figure"] == "objective-by-size"}
    # Two sizes of each objective, and two objectives of each size; not CLM of one size with MLM of another.
    assert pairs == {
        ("210m-clm-400", "610m-clm-400"), ("210m-mlm40-400", "610m-mlm40-400"),
        ("210m-clm-400", "210m-mlm40-400"), ("610m-clm-400", "610m-mlm40-400"),
    }  # fmt: skip


def test_every_score_is_in_the_table(study: Path) -> None:
    rows = rows_of(study / "report" / "scores.csv")
    assert len(rows) == len(MODELS) * 5 * len(SEEDS)
    row = next(row for row in rows if row["model"] == "610m-clm-dec400-mlm40-420" and row["test_set"] == "nq")
    assert [row[key] for key in ("size", "objective", "masking_ratio", "clm_steps", "total_steps", "continued_from")] == [
        "610m", "mlm", "0.4", "0", "420", "610m-clm-400"
    ]  # fmt: skip
    assert (row["group"], row["task"]) == ("IR", "nq")


def test_losses_count_the_steps_of_the_model_that_is_continued(study: Path) -> None:
    rows = [row for row in rows_of(study / "report" / "losses.csv") if row["run"] == "610m-clm-dec400-mlm40-500"]
    assert {row["kind"] for row in rows} == {"training", "validation", "decay"}
    assert min(float(row["step"]) for row in rows) > 400
    assert [float(row["step"]) for row in rows if row["kind"] == "decay"] == [480]


def test_the_same_records_give_the_same_bytes_in_one_folder_or_two(study: Path, tmp_path: Path) -> None:
    """As with checkpoints and records in a bucket, and logs on a machine."""
    logs, records = tmp_path / "logs", tmp_path / "records"
    shutil.copytree(study, logs, ignore=shutil.ignore_patterns("report"))
    records.mkdir()
    shutil.move(logs / "sweep", records / "sweep")
    assert main(["report", str(records), str(logs), "--out", str(tmp_path / "report")]) == 0
    for file in (study / "report").iterdir():
        assert (tmp_path / "report" / file.name).read_bytes() == file.read_bytes(), file.name
    shutil.copytree(records / "sweep", logs / "sweep")
    refused = r"sweep/sweep.json is in both .*records and .*logs: expected it in only one of a study's folders"
    with pytest.raises(UserError, match=refused):
        read_study([str(records), str(logs)])


def test_what_is_missing_is_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["610m-clm-420", "610m-muon-420", "encoder", "other"]
    for name in models[:2]:
        write_run(tmp_path, "610m-clm-420", name)
        (tmp_path / name / "metrics.jsonl").unlink()
    write_run(tmp_path, "610m-mlm40-420")
    (tmp_path / "610m-mlm40-420" / "metrics.jsonl").unlink()
    write_sweep(tmp_path / "first", models, lambda cell, name: (0.5, 0.6))
    write_sweep(tmp_path / "second", ["610m-mlm40-420"], lambda cell, name: (0.5, 0.6) if cell.seed else None)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "clm-share.png").write_bytes(b"of an earlier report")
    assert main(["report", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert {file.stem for file in (tmp_path / "report").glob("*.png")} == {"objective-by-size"}
    left_out = page.split("## Left out\n", 1)[1]
    for name in NAMES - {"objective-by-size"}:
        assert f"- `{name}` needs " in left_out
    assert "- `objective-by-size` doesn't show 610m-muon-420, because 610m-clm-420 has the same place" in left_out
    assert "- no figure shows encoder, other: a model is placed by its run's config.yaml." in left_out
    assert "| 610m-mlm40-420 | 610m | mlm | 40% | 0 | 420 |  | 60.00 ± 0.00 (2 of 3, rate open) |" in page


def test_models_without_a_seed_on_all_tasks_of_a_group_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sweeps of other seeds, and a model without one of the tasks. Those with a mean have no line."""
    models = ("210m-clm-400", "610m-clm-400", "whole")
    for folder, task, seeds in (("one", SST2, (0, 1)), ("two", MNLI, (7, 8))):
        grid = grid_of(models[: None if task is SST2 else 2], (task,), (1e-5,), seeds)
        store = open_store(str(tmp_path / folder))
        write_grid(store, grid)
        for record in records_of(grid, lambda cell, name: (0.5, 0.5)).values():
            write_record(store, record)
    write_sweep(tmp_path / "three", ["610m-clm-400"], lambda cell, name: (0.5, 0.6), tasks=(MSMARCO,))
    assert main(["report", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "no seed" in line]
    each = "no seed has a score on each test set of SC"
    assert lines == [
        f"- 210m-clm-400, 610m-clm-400: {each} (sst2: 0, 1; mnli-m: 7, 8).",
        f"- whole: {each} (sst2: 0, 1; mnli-m: none).",
    ]


def test_evaluations_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "610m-clm-400")
    for name in ("610m-clm-400", "one more"):
        (tmp_path / "evaluate" / name).mkdir(parents=True)
        (tmp_path / "evaluate" / name / "scores.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    files = "evaluate/610m-clm-400/scores.md, evaluate/one more/scores.md"
    assert f"\n- {EVALUATIONS} {files}, or compare two with biphasic compare.\n" in capsys.readouterr().out


def test_scores_of_a_model_in_two_sweeps(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_sweep(tmp_path / folder, ["610m-clm-42k"])
    with pytest.raises(UserError, match="scores of 610m-clm-42k on sst2 are also in one: expected them in only one sweep"):
        read_study([str(tmp_path)])


def test_configurations_that_are_not_used(tmp_path: Path) -> None:
    for name in ("610m-clm-400", "610m-mlm40-400", "610m-mlm20-400"):
        write_run(tmp_path, name)
    config = tmp_path / "610m-clm-400" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 42", "seed: many"))
    (tmp_path / "610m-mlm40-400" / "config.yaml").write_text("job: finetune\n")
    study = read_study([str(tmp_path)])
    assert list(study.models) == ["610m-mlm20-400"]
    assert set(study.losses.run) == {"610m-mlm20-400"}
    assert study.notes == [
        "610m-clm-400/config.yaml: is not used (seed: expected a valid integer; got 'many')"
    ]  # fmt: skip
    page = (report_files(study)["report.md"] or b"").decode()
    assert f"- {study.notes[0]}.\n" in page


def test_files_with_other_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not a number that can be used names the file; what is not of a run is left out."""
    for name in ("610m-clm-400", "610m-mlm40-400"):
        write_run(tmp_path, name)
    (tmp_path / "610m-mlm40-400" / "config.yaml").write_text("12\n")
    metrics = tmp_path / "610m-clm-400" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"note": 1}\nnull\n')
    assert main(["report", str(tmp_path)]) == 0
    assert "- 610m-mlm40-400/config.yaml: is not used (" in capsys.readouterr().out
    with metrics.open("a") as file:
        file.write('{"batch": 401, "loss/train/clm": 1' + 400 * "0" + "}\n")
    assert main(["report", str(tmp_path)]) == 2
    assert f"{metrics}: can't be read (int too large to convert to float)" in capsys.readouterr().err


def test_a_study_without_a_model_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "610m-clm-400").mkdir()
    (tmp_path / "610m-clm-400" / "config.yaml").write_text("job: pretrain\n")
    assert main(["report", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "- 610m-clm-400/config.yaml: is not used (" in page
    assert all(f"- `{name}` needs " in page for name in NAMES)


def test_a_folder_that_is_neither_a_sweep_nor_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    refused = "expected a sweep's output (with sweep.json) or a study's folder (with a run or a sweep in a subfolder)"
    assert refused in capsys.readouterr().err
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    assert main(["report", *folders]) == 2
    assert f"{tmp_path}/a {tmp_path}/b: {refused}" in capsys.readouterr().err
    # One of them is enough, and the report says what the other one holds.
    write_study(tmp_path / "a")
    assert main(["report", *folders]) == 0
    assert f"- {tmp_path}/b: holds neither a run nor a sweep" in capsys.readouterr().out
