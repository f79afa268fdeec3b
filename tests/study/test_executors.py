"""How runs are submitted: commands for Slurm and other schedulers, and signals on this machine. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.study.run import pretrain

ROOT = Path(__file__).parents[2]
MORE = "{continues: clm, objective.phases: [{name: mlm}], schedule: {warmup: 0ba, decay: 40ba}, max_duration: "


def study_of(folder: Path, executor: str) -> StudyConfig:
    """Four models: CLM, a switch in it, MLM continued from its end, and the same longer."""
    models = f"models={{clm-mlm-440: {MORE} 40ba}}, clm-mlm-600: {MORE} 200ba}}}}"
    config = load(ROOT / "tests/config/study.yaml", [f"folder={folder}/study", f"executor={executor}", models])
    assert isinstance(config, StudyConfig)
    return config


SCHEDULER = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["LOG"], "a") as log: log.write(json.dumps(sys.argv) + "\\n")
if sys.argv[0].endswith("squeue"): print(os.environ.get("QUEUE", ""))
if sys.argv[0].endswith("sbatch"): print(1000 + sum("sbatch" in line.split(",")[0] for line in open(os.environ["LOG"])))
"""


def test_commands_for_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text(SCHEDULER)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    study = study_of(tmp_path, "{kind: slurm, options: ['--nodes=2', '--time=1:00:00']}")
    monkeypatch.setenv("QUEUE", "77 study.clm-mlm-440\n78 other")
    assert pretrain(study, limit=3) == 0
    folder, script = tmp_path / "study", "recipes/launch/slurm.sbatch"
    options = ["--nodes=2", "--time=1:00:00", script]
    commands = [json.loads(line)[1:] for line in log.read_text().splitlines()][1:]

    def command(name: str, *dependency: str) -> list[str]:
        return ["--parsable", f"--job-name=study.{name}", *dependency, *options, str(folder / name / "run.yaml")]

    after = ("--dependency=afterok:1001", "--kill-on-invalid-dep=yes")
    assert commands == [command("clm"), command("biphasic", *after), command("clm-mlm-600", *after)]
    assert "clm-mlm-440: job 77 is in the queue" in capsys.readouterr().out
    config = load(folder / "biphasic" / "run.yaml")
    assert isinstance(config, PretrainConfig) and config.start_from == str(folder / "clm" / "checkpoints")


def test_a_command_for_each_ready_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = "printf '%s|' launch {name} --env 'FILE={file}'"
    study = study_of(tmp_path, f'{{kind: command, command: "{command}"}}')
    assert pretrain(study) == 0
    out = capfd.readouterr().out
    assert f"launch|clm|--env|FILE={tmp_path}/study/clm/run.yaml|" in out
    assert "biphasic: waits for clm" in out and "clm-mlm-600: waits for clm" in out


LAUNCHER = """
import os, signal, subprocess, sys
def main():
    print("arguments", sys.argv[1:], flush=True)
    rank = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(STATUS)); "
    rank += "print('up', flush=True); time.sleep(60)"
    return subprocess.call([sys.executable, "-c", rank])
"""


@pytest.mark.parametrize("status", [75, 0])
def test_a_signal_reaches_the_ranks_and_stops_the_study(status: int, tmp_path: Path) -> None:
    """With a replacement for Composer's launcher, whose rank runs until it is asked to save and stop, or just finishes."""
    package = tmp_path / "composer" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "composer" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "launcher.py").write_text(LAUNCHER.replace("STATUS", str(status)))
    code = (
        "import sys; from pathlib import Path; from biphasic.config.study import LocalExecutor\n"
        "from biphasic.study.executors import train_here\n"
        "sys.exit(train_here(LocalExecutor(kind='local', processes=2), Path('run.yaml')))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert study.stdout is not None
    assert study.stdout.readline().strip() == f"arguments ['-n', '2', '{ROOT}/src/main.py', 'run.yaml']"
    assert study.stdout.readline() == "up\n"
    start = time.monotonic()
    study.send_signal(signal.SIGTERM)
    assert study.wait(30) == 75 and time.monotonic() - start < 20
