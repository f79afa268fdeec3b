"""The commands of the recipes' run.sh: in the right order, with YAMLs, keys and places that exist and agree."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from biphasic.config.base import JobConfig
from biphasic.config.convert import ConvertConfig
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from helpers.tiny import ROOT

# Studies have tests of their own, in test_mini.py and test_three_phases.py.
SCRIPTS = sorted(path for path in (ROOT / "recipes").glob("*/run.sh") if not (path.parent / "study.yaml").is_file())
ARGUMENTS = {
    "continue_decoder": ["org/decoder", "2000", "seed=3"],
    "long_context": ["longer", "seed=3"],
    "your_language": [],
}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder of programs that only write down how they were called."""
    for name in ("python", "composer", "biphasic"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >>{tmp_path}/log; echo >>{tmp_path}/log\n')
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("bucket", [None, "s3://my-bucket"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_the_commands_fit_together(
    script: Path, bucket: str | None, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUCKET", raising=False)
    if bucket is not None:
        monkeypatch.setenv("BUCKET", bucket)
    environment = {**os.environ, "PATH": f"{commands / 'bin'}:/usr/bin:/bin"}
    run = subprocess.run([script, *ARGUMENTS[script.parent.name]], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    calls = [shlex.split(line) for line in (commands / "log").read_text().splitlines()]
    configs = [config_of(call) for call in calls if any(part.endswith(".yaml") for part in call)]
    conversion, *again = [config for config in configs if isinstance(config, ConvertConfig)]
    assert all(config == conversion for config in again)
    pretraining, *again = [config for config in configs if isinstance(config, PretrainConfig)]
    assert all(config == pretraining for config in again)
    rows = {
        stream.remote or stream.local: inputs.data.sequence_length
        for inputs in pretraining.inputs
        for stream in inputs.streams.values()
    }
    assert rows[f"{conversion.output}/train"] == conversion.sequence_length
    [exported] = [call for call in calls if call[:2] == ["biphasic", "export"]]
    assert exported[2] == pretraining.checkpoint_destination


def config_of(call: list[str]) -> JobConfig:
    at = next(index for index, part in enumerate(call) if part.endswith(".yaml"))
    assert call[0] == "biphasic" or (ROOT / call[1]).is_file()
    return load(ROOT / call[at], [part for part in call[at + 1 :] if "=" in part])


def test_the_steps_of_the_paper() -> None:
    """The decoder recipe fits the paper's shortest run: 2,000 steps."""
    for steps in (2000, 12000, 22000):
        load(ROOT / "recipes" / "continue_decoder" / "pretrain.yaml", [f"max_duration={steps}ba"])


def test_every_recipe_has_a_readme() -> None:
    folders = {path.parent for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "base"}
    assert len(folders) >= 4
    assert not [folder.name for folder in folders if not (folder / "README.md").is_file()]
