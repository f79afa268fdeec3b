"""The commands of the recipes' run.sh: in the right order, with YAMLs, keys and places that exist and agree."""

import os
import runpy
import shlex
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("hard_negatives/mine.py", ["nope", "nope", "mined.parquet"]),
        ("late_interaction/late_interaction.py", ["nope", "--pairs=nope"]),
        ("measured.py", ["nope", "nope", "--record=x", "--hours=1"]),
        ("mini/baselines.py", ["nope"]),
        ("mini/make_tasks.py", ["nope"]),
        ("mini/protocol_run.py", ["finetune", "protocol", "nope", "3"]),
        ("mini/results.py", ["nope"]),
        ("muon/compare.py", ["nope"]),
        ("overlap/overlap.py", ["nope", "nope"]),
        ("paper/against.py", ["nope"]),
        ("quickstart/report.py", ["nope"]),
        ("quickstart/score.py", ["nope", "--pairs=nope"]),
        ("reranker/reranker.py", ["nope", "--pairs=nope"]),
        ("sparse/sparse.py", ["nope", "--pairs=nope"]),
        ("three_phases/steps.py", ["nope"]),
        ("your_language/gather.py", ["nope"]),
    ],
)
def test_a_folder_that_does_not_exist_is_said_in_a_line(
    script: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, *arguments])
    monkeypatch.setattr("sys.path", [str((ROOT / "recipes" / script).parent), *sys.path])
    names = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "recipes" / script), run_name="__main__")
    finally:
        # Recipes have modules of the same name.
        for name in set(sys.modules) - names:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "recipes")):
                del sys.modules[name]
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.err.count("\n") == 1 and "nope" in printed.err, printed.err
    assert not printed.out and not list(tmp_path.iterdir())


def test_a_decoder_that_does_not_exist_is_said_in_a_line(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
    }
    script = ROOT / "recipes/continue_decoder/run.sh"
    done = subprocess.run([script, tmp_path / "nope"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nope" in done.stderr, done.stderr


def test_the_steps_of_the_paper() -> None:
    """The decoder recipe fits the paper's shortest run: 2,000 steps."""
    for steps in (2000, 12000, 22000):
        load(ROOT / "recipes" / "continue_decoder" / "pretrain.yaml", [f"max_duration={steps}ba"])


def test_every_recipe_has_a_readme() -> None:
    folders = {path.parent for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "base"}
    assert len(folders) >= 4
    assert not [folder.name for folder in folders if not (folder / "README.md").is_file()]
