"""From a sweep's YAML to its trials."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import biphasic.main as job
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.errors import ConfigError, UserError
from biphasic.storage import open_store
from biphasic.sweep.grid import build_grid, trial_configs
from biphasic.sweep.records import Cell, Grid, read_grid, write_grid

LoadSweep = Callable[..., SweepConfig]
ROOT = Path(__file__).parents[2]
TWO = {"a": {"do": "train"}, "b": {"do": "fail"}}


def grid_of(config: SweepConfig) -> tuple[Grid, dict[Cell, FinetuneConfig]]:
    configs = trial_configs(config)
    return build_grid(config, configs, "helpers.small_trials"), configs


def test_every_cell_once_seed_by_seed(sweep: LoadSweep) -> None:
    config = sweep(TWO, tasks=("sst2", "qqp"), overrides=["batch_size=8"])
    grid, configs = grid_of(config)
    cells = list(grid.trials.values())
    assert len(set(cells)) == 16 == len(configs)
    assert cells[:3] == [Cell("a", "sst2", 1e-5, 0), Cell("a", "sst2", 2e-5, 0), Cell("b", "sst2", 1e-5, 0)]
    assert [cell.seed for cell in cells] == [0] * 8 + [1] * 8
    for name, cell in grid.trials.items():
        trial = configs[cell]
        assert name.startswith(f"{cell.model}.{cell.task}.")
        assert (trial.optimizer.lr, trial.seed, trial.task.name) == (cell.lr, cell.seed, cell.task)
        assert trial.model.path == config.models[cell.model].path
        assert (trial.batch_size, trial.save_model, trial.logging.progress_bar) == (8, False, False)
    assert grid.models == ("a", "b")
    assert [task.name for task in grid.tasks] == ["sst2", "qqp"]


def test_names_follow_content(sweep: LoadSweep) -> None:
    before = grid_of(sweep(TWO))[0].trials
    assert list(grid_of(sweep(TWO))[0].trials) == list(before)
    # A changed model file changes that model's trials only; a setting changes all trials.
    after = grid_of(sweep({**TWO, "b": {"do": "train", "x": 1}}))[0].trials
    unchanged = {cell for name, cell in after.items() if name in before}
    assert {cell.model for cell in unchanged} == {"a"} and len(unchanged) == 4
    assert not set(grid_of(sweep(TWO, overrides=["batch_size=8"]))[0].trials) & set(before)


def test_all_problems_are_reported_at_once(sweep: LoadSweep, tmp_path: Path) -> None:
    config = sweep(TWO, tasks=("sst2", "qqp", "mnli"), overrides=["batch_sise=8"])
    content = yaml.safe_load((tmp_path / "qqp.yaml").read_text())
    (tmp_path / "qqp.yaml").write_text(yaml.safe_dump({**content, "warmup": "1 hour"}))
    (tmp_path / "mnli.yaml").unlink()
    with pytest.raises(ConfigError) as caught:
        trial_configs(config)
    problems = [(problem.where, problem.key) for problem in caught.value.problems]
    overrides = "overrides of the sweep, with "
    assert sorted(problems) == sorted([
        (f"{overrides}{tmp_path}/sst2.yaml", "batch_sise"),
        (f"{overrides}{tmp_path}/qqp.yaml", "batch_sise"),
        (f"{tmp_path}/qqp.yaml:9", "warmup"),
        (f"{tmp_path}/mnli.yaml", ""),
    ])  # fmt: skip


def test_one_model_or_task_by_two_paths(
    write_sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    path = write_sweep(models={"m": {"do": "train"}}, tasks=("sst2",))
    for other in (f"models.n={{path: {tmp_path}/below/../m.model}}", "models.n={path: ../m.model}", "tasks.t=../sst2.yaml"):
        with pytest.raises(ConfigError) as caught:
            load(path, [other])
        first = "tasks.sst2" if "tasks" in other else "models.m.path"
        [problem] = caught.value.problems
        assert problem.message.startswith(f"expected another one than that of {first}; got ")


def test_a_task_of_another_job_is_refused(sweep: LoadSweep, tmp_path: Path) -> None:
    config = sweep()
    (tmp_path / "sst2.yaml").write_text((ROOT / "yamls" / "quickstart.yaml").read_text())
    with pytest.raises(ConfigError) as caught:
        trial_configs(config)
    assert caught.value.problems[0].key in ("model.path", "save_model", "job")


def test_all_missing_models_are_reported_at_once(sweep: LoadSweep, tmp_path: Path) -> None:
    config = sweep(TWO)
    for name in TWO:
        (tmp_path / f"{name}.model").unlink()
    with pytest.raises(UserError) as caught:
        grid_of(config)
    assert len(str(caught.value).splitlines()) == 2


def test_only_sweeps_have_limits() -> None:
    command = [sys.executable, "src/main.py", "yamls/quickstart.yaml", "--limit", "3"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "--limit is for job: sweep and job: study; yamls/quickstart.yaml is job: pretrain\n"


def test_the_papers_grid() -> None:
    config = load(ROOT / "yamls" / "sweep" / "paper.yaml")
    assert isinstance(config, SweepConfig)
    assert config.learning_rates == [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4] and config.seeds == [0, 1, 2, 3, 4]
    assert len(config.tasks) == 10


def test_a_grid_reads_as_it_was_written(sweep: LoadSweep, tmp_path: Path) -> None:
    grid, _ = grid_of(sweep())
    write_grid(open_store(str(tmp_path / "o")), grid)
    assert read_grid(open_store(str(tmp_path / "o"))) == grid


def test_a_plan_refuses_what_the_sweep_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for models and data that are not there yet, which other commands make."""
    data, model = tmp_path / "tickets", tmp_path / "model"
    task = {"job": "finetune", "run_name": "tickets", "model": {"path": str(model)}, "optimizer": {"lr": 1e-4},
            "task": {"kind": "tokens", "name": "tickets", "data": str(data)},
            "max_duration": "10ba", "batch_size": 8}  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    content = {"job": "sweep", "output": str(tmp_path / "sweep"), "models": {"encoder": {"path": str(model)}},
               "tasks": {"tickets": str(tmp_path / "task.yaml")}, "learning_rates": [1e-4], "seeds": [0]}  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))

    def plan() -> tuple[int, str]:
        return job.main([str(tmp_path / "sweep.yaml"), "--plan"]), capsys.readouterr().out

    assert "MISSING        tickets of encoder: model " in plan()[1]
    model.mkdir()
    status, printed = plan()
    assert status == 0 and f"MISSING        tickets of encoder: task.data {data}: " in printed
    data.mkdir()
    (data / "task.json").write_text('{"kind": "classification"}')
    status, printed = plan()
    assert status == 2 and "PROBLEM        tickets of encoder: " in printed and "expected tokens" in printed
