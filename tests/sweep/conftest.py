"""A sweep's YAML over small trials."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig

HERE = Path(__file__).parent
Sweep = Callable[..., SweepConfig]


@pytest.fixture(autouse=True)
def small_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and other drivers import it by name."""
    monkeypatch.syspath_prepend(str(HERE))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *([before] if before else [])]))
    monkeypatch.setenv("SMALL_TRIALS_LOG", str(tmp_path / "log"))
    sys.modules.pop("small_trials", None)


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[..., Path]:
    """The YAML; `models` are what each one's file says, other arguments replace keys."""

    def write(models: dict[str, dict[str, Any]] | None = None, tasks: tuple[str, ...] = ("sst2",), **keys: Any) -> Path:
        for name, content in (models or {"m": {"do": "train"}}).items():
            (tmp_path / f"{name}.model").write_text(json.dumps(content))
        for name in tasks:
            task = {"kind": "classification", "name": name, "data": str(tmp_path / "data" / name)}
            content = {"job": "finetune", "run_name": name, "model": {"path": "none"}, "task": task}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        content = {
            "job": "sweep",
            "output": str(tmp_path / "out"),
            "models": {name: {"path": str(tmp_path / f"{name}.model")} for name in models or ["m"]},
            "tasks": {name: str(tmp_path / f"{name}.yaml") for name in tasks},
            "learning_rates": [1e-5, 2e-5],
            "seeds": [0, 1],
            **keys,
        }
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def sweep(write_sweep: Callable[..., Path]) -> Sweep:
    """The same, loaded."""

    def make(*given: Any, **keys: Any) -> SweepConfig:
        config = load(write_sweep(*given, **keys))
        assert isinstance(config, SweepConfig)
        return config

    return make
