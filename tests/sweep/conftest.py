"""Sweeps of small trials."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig

TESTS = str(Path(__file__).parents[1])
LoadSweep = Callable[..., SweepConfig]


@pytest.fixture(autouse=True, scope="package")
def small_trials() -> Iterator[None]:
    """Workers and driver processes import `small_trials` by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of the test's trials."""
    return tmp_path / "log"


@pytest.fixture
def write_sweep(tmp_path: Path, log: Path) -> Callable[..., Path]:
    """Writes a sweep's YAML; `models` are the contents of the models' files, other arguments replace keys."""

    def write(
        models: dict[str, dict[str, Any]] | None = None,
        tasks: tuple[str, ...] = ("sst2",),
        **keys: Any,
    ) -> Path:
        for name, content in (models or {"m": {"do": "train"}}).items():
            (tmp_path / f"{name}.model").write_text(json.dumps({**content, "log": str(log)}))
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
def sweep(write_sweep: Callable[..., Path]) -> LoadSweep:
    """Writes a sweep's YAML and loads it."""

    def make(*arguments: Any, **keys: Any) -> SweepConfig:
        config = load(write_sweep(*arguments, **keys))
        assert isinstance(config, SweepConfig)
        return config

    return make
