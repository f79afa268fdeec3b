"""A sweep as people run it: real fine-tunings on Ray by `src/main.py`, then the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.finetuning.trial import run_trial
from biphasic.storage import store
from biphasic.sweep.grid import configurations
from biphasic.sweep.records import read_grid, read_records
from tiny import ROOT, write_tokenizer
from toy_sets import config_of, make_sets, write_encoder

SIZES = {"train": 160, "validation": 40, "test": 40}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )


def test_models_by_tasks_by_rates_by_seeds(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    sets = make_sets(tmp_path, SIZES)
    models = {f"model-{seed}k": {"path": str(write_encoder(tmp_path / f"m{seed}", tmp_path / "tokenizer", seed)),
                                 "steps": 1000 * seed} for seed in (1, 2)}  # fmt: skip
    tasks: dict[str, str] = {}
    for name in ("sst2", "msmarco"):
        one = config_of(name, sets, Path("none"), tmp_path, max_duration="6ba")
        tasks[name] = str(tmp_path / f"{name}.yaml")
        content: dict[str, Any] = one.model_dump(mode="json")
        content["model"] = {"path": "none"}
        Path(tasks[name]).write_text(yaml.safe_dump(content))
    # At the highest rate nothing is left of the weights.
    sweep = {"job": "sweep", "output": str(tmp_path / "out"), "models": models, "tasks": tasks,
             "learning_rates": [1e-3, 5e-3, 1e30], "seeds": [0, 1]}  # fmt: skip
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))

    ran = command("src/main.py", path)
    assert ran.returncode == 1, ran.stderr
    assert "16 of 24 trials done, 8 failed, 0 left" in ran.stdout
    assert "is not a finite number" in ran.stdout
    again = command("src/main.py", path)
    assert again.returncode == 1
    assert "16 of 24 trials done, 8 failed, 0 left" in again.stdout

    grid = read_grid(store(str(tmp_path / "out")))
    records = read_records(store(str(tmp_path / "out")), grid.trials)
    assert len(records) == 24
    config = load(path)
    assert isinstance(config, SweepConfig)
    cells = configurations(config)
    # The same trial here, by itself: the same scores, to the last bit where one thread computes both.
    for name, record in [(name, one) for name, one in records.items() if one.status == "done"][:3]:
        alone = run_trial(cells[grid.trials[name]])
        assert [one.test for one in alone.results] == [one.test for one in record.results]
        assert [one.validation for one in alone.results] == [one.validation for one in record.results]

    report = command("-m", "biphasic.report", tmp_path / "out")
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "out" / "report" / "report.md").read_text()
    for word in ("model-1k", "model-2k", "sst2", "msmarco", "(2)", "finite number"):
        assert word in page, word
