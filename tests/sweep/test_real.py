"""A sweep as users run it: real fine-tunings by `src/main.py`, which ends with the report."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import biphasic.main as job
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.errors import UserError
from biphasic.finetuning import trial
from biphasic.finetuning.trial import run_trial
from biphasic.report.example_scores import read_scored_model
from biphasic.storage import open_store
from biphasic.sweep.grid import build_grid, trial_configs
from biphasic.sweep.plan import plan_sweep
from biphasic.sweep.records import Cell, read_grid, read_records
from biphasic.sweep.run import run
from helpers.tiny import ROOT, write_tokenizer
from helpers.toy_sets import config_of, make_sets, write_encoder

SIZES = {"train": 160, "validation": 40, "test": 40}


def test_a_sweep_and_its_plan_refuse_what_a_fine_tuning_and_its_plan_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair of a model and a task is checked once, however many trials it has."""
    write_tokenizer(tmp_path / "tokenizer")
    sets = make_sets(tmp_path, SIZES)
    models = {name: {"path": str(write_encoder(tmp_path / name, tmp_path / "tokenizer", 1))} for name in ("m", "n")}
    shutil.copytree(sets / "sst2", sets / "three")
    record = json.loads((sets / "three/task.json").read_text())
    (sets / "three/task.json").write_text(json.dumps({**record, "label_names": ["x", "y", "z"]}))
    for name, toy in (("sst2", "sst2"), ("three", "sst2"), ("msmarco", "msmarco")):
        content = config_of(toy, sets, Path("none"), tmp_path, max_duration="4ba").model_dump(mode="json")
        task = content["task"] | ({"name": "three", "data": str(sets / "three")} if name == "three" else {})
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**content, "model": {"path": "none"}, "task": task}))

    def printed(names: tuple[str, ...], *overrides: str) -> tuple[list[str], list[str]]:
        """The problems that the plan prints, and what the sweep's start says."""
        tasks = {name: str(tmp_path / f"{name}.yaml") for name in names}
        content = {"job": "sweep", "output": str(tmp_path / "out"), "models": models, "tasks": tasks,
                   "learning_rates": [1e-3, 2e-3], "seeds": list(range(9)), "overrides": list(overrides)}  # fmt: skip
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
        status = [job.main([str(tmp_path / "sweep.yaml"), "--plan"])]
        plan = [line.partition("PROBLEM")[2].strip() for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
        status.append(job.main([str(tmp_path / "sweep.yaml")]))
        assert status == [2, 2] and not (tmp_path / "out/trials").exists()
        return plan, capsys.readouterr().err.splitlines()

    f1 = f"three of m and 1 more: task.metrics: f1 needs two labels; {sets}/three has 3"
    full = f"three of m and 1 more: {sets}/three: 160 training examples don't fill one batch of 512"
    for names, override, problem in (
        (("three",), "task.metrics=[f1]", f1),
        (("sst2", "three"), "task.metrics=[f1]", f1),
        (("three",), "batch_size=512", full),
        (("sst2",), "max_duration=100ba warmup=50ba", "sst2 of m and 1 more: warmup: 50ba is not shorter than the "),
        (("msmarco",), "task.dimensions=[512]", "msmarco of m and 1 more: task.dimensions: 512 is more than the model's"),
    ):
        plan, start = printed(names, *override.split())
        assert plan == start and len(plan) == 1 and plan[0].startswith(problem), (plan, start)
    checked = []

    def check(config: FinetuneConfig) -> list[str]:
        checked.append((config.model.path, config.task.name))
        return [f"{config.task.name} has pairs"]

    monkeypatch.setattr(trial, "check_trial", check)
    config = load(tmp_path / "sweep.yaml", ["overrides=[]"])
    assert isinstance(config, SweepConfig)
    assert plan_sweep(config).warnings == ["msmarco has pairs"] and len(checked) == len(set(checked)) == 2
    assert len(build_grid(config, trial_configs(config)).trials) == 36
    run(config, limit=0)
    assert "WARNING: msmarco has pairs\n" in capsys.readouterr().out


def test_trials_of_a_sweep_equal_single_fine_tunings(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    sets = make_sets(tmp_path, SIZES)
    models = {"model-1k": {"path": str(write_encoder(tmp_path / "m", tmp_path / "tokenizer", 1))}}
    tasks: dict[str, Any] = {}
    for name in ("sst2", "msmarco"):
        task = config_of(name, sets, Path("none"), tmp_path, max_duration="4ba")
        tasks[name] = str(tmp_path / f"{name}.yaml")
        content: dict[str, Any] = {**task.model_dump(mode="json"), "model": {"path": "none"}}
        Path(tasks[name]).write_text(yaml.safe_dump(content))
    # At the highest rate the weights become NaN or Inf.
    sweep = {"job": "sweep", "output": str(tmp_path / "out"), "models": models, "tasks": tasks,
             "learning_rates": [1e-3, 1e30], "seeds": [0, 1]}  # fmt: skip
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The plan needs configurations and hashes alone; what computes with a model takes seconds to import.
    heavy = "{'composer', 'torch._dynamo', 'transformers.modeling_utils'}"
    code = f"import sys; sys.path.insert(0, 'src'); import main; status = main.main([{str(path)!r}, '--plan'])\n"
    code += f"sys.exit(status or ', '.join({heavy} & set(sys.modules)) or 0)"
    plan = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert plan.returncode == 0, plan.stderr
    assert "8 trials: 0 done, 8 left" in plan.stdout
    command = [sys.executable, "src/main.py", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert ran.returncode == 1, ran.stderr
    assert "4 of 8 trials done, 4 failed, 0 left" in ran.stdout
    assert "is not a finite number" in ran.stdout

    grid = read_grid(open_store(str(tmp_path / "out")))
    records = read_records(open_store(str(tmp_path / "out")), grid.trials)
    assert len(records) == 8
    config = load(path)
    assert isinstance(config, SweepConfig)
    configs = trial_configs(config)
    # The same trial by itself in this process has the same scores, to the last bit where one thread computes both.
    done = {record.cell.task: record for record in records.values() if record.status == "done"}
    assert done.keys() == tasks.keys()
    for record in done.values():
        alone = run_trial(configs[record.cell])
        assert [(result.validation, result.test) for result in alone.results] == [
            (result.validation, result.test) for result in record.results
        ]

    # Each trial's predictions are kept, without rankings, so that models of sweeps can be compared.
    model = read_scored_model(str(tmp_path / "out"))
    seeds = {key: sorted(scores.examples) for key, scores in model.sets.items()}
    assert seeds == {("sst2", "accuracy"): [0, 1], ("msmarco", "ndcg_at_10"): [0, 1]}
    for (task, _), scores in model.sets.items():
        for seed, each in scores.examples.items():
            [test] = [record.results[0].test for record in records.values()
                      if record.cell == Cell("model-1k", task, 1e-3, seed)]  # fmt: skip
            assert float(each.score(each.values)) == pytest.approx(test, abs=1e-9)
    assert not list((tmp_path / "out/predictions").rglob("*.gz"))
    with pytest.raises(UserError, match="has no model other: expected FOLDER@MODEL with one of model-1k"):
        read_scored_model(f"{tmp_path / 'out'}@other")
    next((tmp_path / "out/trials").glob("model-1k.sst2.*.json")).unlink()
    assert read_scored_model(str(tmp_path / "out")).left_out == [
        "sst2 (unfinished: run the sweep again, with --retry-failed if trials failed)"
    ]

    page = (tmp_path / "out" / "report" / "report.md").read_text()
    for word in ("model-1k", "sst2", "msmarco", "(2)", "finite number"):
        assert word in page, word
