"""From a sweep's YAML to its trials."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from biphasic.config.errors import ConfigError, UserError
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.sweep.grid import Made, configurations, content_of, functions_of, make
from biphasic.sweep.records import Cell, Grid, GridModel, Record, Result
from biphasic.sweep.view import LiveView, rows

Sweep = Callable[..., SweepConfig]
ROOT = Path(__file__).parents[2]
TWO = {"a": {"do": "train"}, "b": {"do": "fail"}}


def made(config: SweepConfig) -> Made:
    return make(config, configurations(config), functions_of("small_trials"))


def test_every_cell_once_seed_by_seed(sweep: Sweep) -> None:
    config = sweep(TWO, tasks=("sst2", "qqp"), overrides=["batch_size=8"])
    found = made(config)
    cells = list(found.grid.trials.values())
    assert len(set(cells)) == 16 == len(found.configs)
    assert cells[:3] == [Cell("a", "sst2", 1e-5, 0), Cell("a", "sst2", 2e-5, 0), Cell("b", "sst2", 1e-5, 0)]
    assert [cell.seed for cell in cells] == [0] * 8 + [1] * 8
    for name, cell in found.grid.trials.items():
        one = found.configs[name]
        assert name.startswith(f"{cell.model}.{cell.task}.")
        assert (one.optimizer.lr, one.seed, one.task.name) == (cell.lr, cell.seed, cell.task)
        assert one.model.path == config.models[cell.model].path
        assert (one.batch_size, one.save_model, one.logging.progress_bar) == (8, False, False)
    assert found.grid.models == (GridModel("a"), GridModel("b"))
    assert [task.name for task in found.grid.tasks] == ["sst2", "qqp"]


def test_names_follow_content(sweep: Sweep, tmp_path: Path) -> None:
    before = made(sweep(TWO)).grid.trials
    assert list(made(sweep(TWO)).grid.trials) == list(before)
    # Another file changes that model's trials alone; so does a setting, and all of them.
    after = made(sweep({**TWO, "b": {"do": "train", "x": 1}})).grid.trials
    same = {cell for name, cell in after.items() if name in before}
    assert {cell.model for cell in same} == {"a"} and len(same) == 4
    assert not set(made(sweep(TWO, overrides=["batch_size=8"])).grid.trials) & set(before)
    # A model under another name: another trial of the same content.
    renamed = made(sweep({"c": TWO["a"]})).grid.trials
    assert not set(renamed) & set(before)
    assert {content_of(name) for name in renamed} < {content_of(name) for name in before}


def test_everything_wrong_at_once(sweep: Sweep, tmp_path: Path) -> None:
    config = sweep(TWO, tasks=("sst2", "qqp", "mnli"), overrides=["batch_sise=8"])
    content = yaml.safe_load((tmp_path / "qqp.yaml").read_text())
    (tmp_path / "qqp.yaml").write_text(yaml.safe_dump({**content, "warmup": "1 hour"}))
    (tmp_path / "mnli.yaml").unlink()
    with pytest.raises(ConfigError) as caught:
        configurations(config)
    found = [(problem.where, problem.key) for problem in caught.value.problems]
    overrides = "overrides of the sweep, with "
    assert sorted(found) == sorted([
        (f"{overrides}{tmp_path}/sst2.yaml", "batch_sise"),
        (f"{overrides}{tmp_path}/qqp.yaml", "batch_sise"),
        (f"{tmp_path}/qqp.yaml:9", "warmup"),
        (f"{tmp_path}/mnli.yaml", ""),
    ])  # fmt: skip


def test_a_task_of_another_job(sweep: Sweep, tmp_path: Path) -> None:
    config = sweep()
    (tmp_path / "sst2.yaml").write_text((ROOT / "yamls" / "quickstart.yaml").read_text())
    with pytest.raises(ConfigError) as caught:
        configurations(config)
    assert caught.value.problems[0].key in ("model.path", "save_model", "job")


def test_all_missing_models(sweep: Sweep, tmp_path: Path) -> None:
    config = sweep(TWO)
    for name in TWO:
        (tmp_path / f"{name}.model").unlink()
    with pytest.raises(UserError) as caught:
        made(config)
    assert len(str(caught.value).splitlines()) == 2


def test_rows_of_the_view(sweep: Sweep) -> None:
    grid = made(sweep(TWO)).grid
    records = {name: _record(name, cell) for name, cell in grid.trials.items() if cell != Cell("a", "sst2", 2e-5, 1)}
    [a, b] = rows(grid, records)
    # The rate with both seeds, although the other's only one is better.
    assert (a.done, a.failed, a.left, a.lr, a.validation) == (3, 0, 1, 1e-5, pytest.approx(0.15))
    assert a.test == pytest.approx(0.25)
    assert (b.done, b.failed, b.left, b.lr) == (0, 4, 0, None)
    from rich.console import Console

    console = Console(width=120, record=True)
    view = LiveView(grid, records, 2, "out", console)
    console.print(view.table())
    text = console.export_text()
    assert "15.0" in text and "25.0" in text and "3 done, 4 failed, 1 left" in text


def _record(name: str, cell: Cell) -> Record:
    if cell.model == "b":
        return Record(name, cell, "failed", error="x")
    score = 0.1 * (1 + cell.seed) * (1 + (cell.lr > 1e-5))
    result = Result("sst2", "sst2", "classification", "accuracy", score, score + 0.1)
    return Record(name, cell, "done", (result,), seconds={"total": 10.0})


def test_only_sweeps_have_limits() -> None:
    command = [sys.executable, "src/main.py", "yamls/quickstart.yaml", "--limit", "3"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == "--limit and --retry-failed are for sweeps; yamls/quickstart.yaml is job: pretrain\n"


def test_the_papers_grid() -> None:
    config = load(ROOT / "yamls" / "sweep" / "paper.yaml")
    assert isinstance(config, SweepConfig)
    assert config.learning_rates == [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4] and config.seeds == [0, 1, 2, 3, 4]
    assert len(config.tasks) == 10


def test_grid_survives_the_disk(sweep: Sweep, tmp_path: Path) -> None:
    from biphasic.storage import store
    from biphasic.sweep.records import read_grid, write_grid

    grid: Grid = replace(made(sweep(halving={"keep": 0.5})).grid)
    write_grid(store(str(tmp_path / "o")), grid)
    assert read_grid(store(str(tmp_path / "o"))) == grid
    assert grid.halving == {"keep": 0.5, "audit": 0.1}
