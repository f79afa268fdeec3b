"""How runs are submitted: commands for Slurm and other schedulers, and signals on this machine. No torch."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from biphasic.checkpointing.manifest import Manifest
from biphasic.config.load import dump, load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.errors import UserError
from biphasic.study.run import pretrain
from biphasic.study.state import RunState
from main import main as run_main

ROOT = Path(__file__).parents[2]
MORE = "{continues: clm, objective.phases: [{name: mlm}], schedule: {warmup: 0ba, decay: 40ba}, max_duration: "


def study_of(folder: Path, executor: str) -> StudyConfig:
    """Four models: CLM, a switch in it, MLM continued from its end, and the same longer."""
    models = f"models={{clm-mlm-440: {MORE} 40ba}}, clm-mlm-600: {MORE} 200ba}}}}"
    config = load(ROOT / "tests/config/study.yaml", [f"folder={folder}/study", f"executor={executor}", models])
    assert isinstance(config, StudyConfig)
    return config


def job_name(study: StudyConfig, name: str) -> str:
    return f"study.{name}.{hashlib.sha256(study.folder.encode()).hexdigest()[:6]}"


SCHEDULER = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["LOG"], "a") as log: log.write(json.dumps(sys.argv) + "\\n")
if sys.argv[0].endswith("squeue"): print(os.environ.get("QUEUE", ""))
if sys.argv[0].endswith("sbatch"): print(1000 + sum("sbatch" in line.split(",")[0] for line in open(os.environ["LOG"])))
"""


def use_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put `sbatch` and `squeue` that only write down their arguments on PATH; return their log."""
    for name in ("sbatch", "squeue"):
        (folder / name).write_text(SCHEDULER)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(folder / "log"))
    return folder / "log"


def test_commands_for_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = use_scheduler(tmp_path, monkeypatch)
    study = study_of(tmp_path, "{kind: slurm, options: ['--nodes=2', '--time=1:00:00']}")
    jobs = {name: job_name(study, name) for name in study.models}
    # A job of another study, whose folder has the same name.
    other = job_name(study_of(tmp_path / "other", "{kind: slurm}"), "clm")
    queue = [f"77|Dependency|{jobs['clm-mlm-440']}", f"76|DependencyNeverSatisfied|{jobs['biphasic']}"]
    monkeypatch.setenv("QUEUE", "\n".join([*queue, f"79|None|{other}", "78|None|other"]))
    assert pretrain(study, limit=3) == 0
    folder, script = tmp_path / "study", "recipes/launch/slurm.sbatch"
    options = ["--nodes=2", "--time=1:00:00", script]
    commands = [json.loads(line)[1:] for line in log.read_text().splitlines()][1:]

    def command(name: str, *dependency: str) -> list[str]:
        return ["--parsable", f"--job-name={jobs[name]}", *dependency, *options, str(folder / name / "run.yaml")]

    after = ("--dependency=afterok:1001", "--kill-on-invalid-dep=yes")
    assert commands == [command("clm"), command("biphasic", *after), command("clm-mlm-600", *after)]
    assert "clm-mlm-440: job 77 is in the queue" in capsys.readouterr().out
    config = load(folder / "biphasic" / "run.yaml")
    assert isinstance(config, PretrainConfig) and config.start_from == str(folder / "clm" / "checkpoints")


def trained(study: StudyConfig, name: str, *batches: int) -> RunState:
    """The state of a run with these checkpoints."""
    config, newest = expand(study)[name], max(batches)
    counts = {
        "rows": 16 * newest,
        "tokens": 4096 * newest,
        "epochs": 0,
        "last_batch": [newest - 1, 16 * (newest - 1), 4096, 0],
    }
    content = {"name": name, "config": config.model_dump(mode="json"), "overridden": [], **counts}
    return RunState(frozenset(batches), Manifest(newest, f"ba{newest}-rank0.pt", {}, content))


@pytest.mark.parametrize(
    ("batches", "start", "dependency"),
    [
        # The checkpoint that `biphasic` starts from is there already, although the other run's job goes on.
        ((100, 110), "clm", None),
        # It isn't, and the job will save it.
        ((40, 60), "clm", "--dependency=afterok:77"),
        # The other run was trained before this one was added, and kept nothing that both share.
        ((360, 400), None, None),
    ],
)
def test_a_run_waits_only_for_a_checkpoint_that_is_missing(
    batches: tuple[int, ...], start: str | None, dependency: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = use_scheduler(tmp_path, monkeypatch)
    study = study_of(tmp_path, "{kind: slurm}")
    monkeypatch.setenv("QUEUE", f"77|None|{job_name(study, 'clm')}")
    states = {**dict.fromkeys(study.models, RunState()), "clm": trained(study, "clm", *batches)}
    monkeypatch.setattr("biphasic.study.run.read_states", lambda _: states)
    assert pretrain(study, limit=1) == 0
    submitted = json.loads(log.read_text().splitlines()[-1])
    assert submitted[-1] == f"{tmp_path}/study/biphasic/run.yaml"
    assert [word for word in submitted if "dependency" in word] == ([] if dependency is None else [dependency])
    config = load(submitted[-1])
    place = None if start is None else study.checkpoints_of(start)
    assert isinstance(config, PretrainConfig) and config.start_from == place


def test_a_command_that_fails_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, "{kind: command, command: \"bash -c 'exit 7' {file}\"}")
    states = {**dict.fromkeys(study.models, RunState()), "clm": trained(study, "clm", 100, 400)}
    monkeypatch.setattr("biphasic.study.run.read_states", lambda _: states)
    assert pretrain(study) == 7
    printed = capfd.readouterr().out
    assert "submitted, " not in printed and "not submitted: bash -c 'exit 7' " in printed and "status 7" in printed
    (tmp_path / "squeue").write_text("#!/bin/bash\necho slurm is down >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"executor: squeue .* failed: slurm is down"):
        pretrain(study_of(tmp_path, "{kind: slurm}"))


def test_a_command_for_each_ready_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = "printf '%s|' launch {name} --env 'FILE={file}'"
    study = study_of(tmp_path, f'{{kind: command, command: "{command}"}}')
    assert pretrain(study) == 0
    out = capfd.readouterr().out
    assert f"launch|clm|--env|FILE={tmp_path}/study/clm/run.yaml|" in out
    assert "biphasic: waits for clm" in out and "clm-mlm-600: waits for clm" in out


@pytest.mark.parametrize("executor", ["{kind: slurm}", "{kind: command, command: 'true {name} {file}'}"])
def test_the_next_command_after_runs_were_submitted(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is that of a stage only when all runs are done."""
    use_scheduler(tmp_path, monkeypatch)
    study = study_of(tmp_path, executor)
    words = [str(tmp_path / "study.yaml")]
    Path(words[0]).write_text(dump(study))
    states = dict.fromkeys(study.models, RunState())
    monkeypatch.setattr("biphasic.study.run.read_states", lambda _: states)
    for limit, following in (([], "when these runs are done"), (["--limit", "1"], "runs the rest, which --limit left out")):
        assert run_main([*words, *limit]) == 0
        printed = capfd.readouterr().out
        assert printed.endswith(f"next: the same command{',' * (not limit)} {following}\n") and "--stage" not in printed
    states |= {name: trained(study, name, int(config.max_duration.value)) for name, config in expand(study).items()}
    assert run_main(words) == 0
    assert capfd.readouterr().out.endswith(f"next: python src/main.py {words[0]} --stage export\n")


def paper_by(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StudyConfig:
    """The paper's study in a bucket, with the documented command that contains `program`, which is replaced by a log."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("BUCKET", "s3://bucket/prefix")
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    code = "import json, os, sys\ntext = '' if sys.argv[0].endswith('sky') else sys.stdin.read()\n"
    code += "log = [sys.argv, os.environ['BUCKET'], text]"
    (folder / program).write_text(f"#!/usr/bin/env python3\n{code}\nprint('LOG', json.dumps(log))\n")
    (folder / program).chmod(0o755)
    blocks = re.findall(r"```yaml\n(executor:.*?)```", (ROOT / "docs/study.md").read_text(), re.DOTALL)
    [executor] = [yaml.safe_load(block)["executor"] for block in blocks if f"{program} " in block]
    config = load("recipes/paper/study.yaml", [f"executor={json.dumps(executor)}", f"output={folder}/runs"])
    assert isinstance(config, StudyConfig)
    return config


NAME = "610m-clm-42k"
"""Other runs start from it, so it keeps more checkpoints than its base."""


def logged(study: StudyConfig, capfd: pytest.CaptureFixture[str]) -> tuple[list[str], str, str]:
    """How the program was called for the run `NAME`: arguments, BUCKET, and standard input."""
    # Without a bucket: none of the runs has a checkpoint.
    states = dict.fromkeys(study.models, RunState())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphasic.study.run.read_states", lambda _: states)
        assert pretrain(study) == 0
    out = capfd.readouterr().out
    assert out.count("submitted, ") == 15 and "610m-clm-10k-mlm40-42k: waits for 610m-clm-42k" in out
    logs = [json.loads(line.removeprefix("LOG ")) for line in out.splitlines() if line.startswith("LOG ")]
    assert len(logs) == 15
    [log] = [log for log in logs if NAME in log[0] or f"name: biphasic-{NAME}\n" in log[2]]
    return log


def require_the_run(study: StudyConfig, encoded: str) -> None:
    """The YAML that node.sh gets is the run of the study."""
    file = Path(study.local_folder) / NAME / "run.yaml"
    assert b64decode(encoded) == file.read_bytes()
    config = load(file)
    assert isinstance(config, PretrainConfig)
    assert len(config.checkpoint.keep_at) == 13 and config.checkpoint.folder == f"s3://bucket/prefix/paper/{NAME}"
    assert config.data.folder == "s3://bucket/prefix/fineweb-edu-100bt"


def test_the_documented_command_for_skypilot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    study = paper_by("sky", tmp_path, monkeypatch)
    arguments, bucket, _ = logged(study, capfd)
    assert bucket == "s3://bucket/prefix"
    file = "recipes/launch/skypilot.yaml"
    assert arguments[1:8] == ["jobs", "launch", "--yes", "--detach-run", "--name", NAME, file]
    options = list(pairwise(arguments))
    assert ("--env", "BUCKET") in options
    given = dict(word.split("=", 1) for option, word in options if option == "--env" and "=" in word)
    task = yaml.safe_load(Path(file).read_text())
    assert given.keys() <= task["envs"].keys()
    # The file's own command, with a replacement for node.sh.
    script = task["run"].replace("recipes/launch/node.sh", "printf '%s\\n'").replace("exec ", "")
    environment = {**task["envs"], **given, "PATH": os.environ["PATH"]}
    words = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert words.stdout.splitlines() == ["run.yaml"]
    require_the_run(study, given["RUN_YAML"])


def test_the_documented_command_for_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    study = paper_by("kubectl", tmp_path, monkeypatch)
    arguments, _, manifests = logged(study, capfd)
    assert arguments[1:] == ["apply", "-f", "-"]
    service, job = yaml.safe_load_all(manifests)
    written_service, written = yaml.safe_load_all((ROOT / "recipes/launch/kubernetes.yaml").read_text())
    name = f"biphasic-{NAME}"
    assert service["metadata"]["name"] == job["metadata"]["name"] == service["spec"]["selector"]["job-name"] == name
    pod = job["spec"]["template"]["spec"]
    variables = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert (pod["subdomain"], variables["MASTER_ADDR"]) == (name, f"{name}-0.{name}")
    assert variables["BUCKET"] == "s3://bucket/prefix"
    assert pod["containers"][0]["args"] == ["run.yaml"]
    require_the_run(study, str(variables["RUN_YAML"]))
    # The rest is as in the file.
    assert service["spec"]["ports"] == written_service["spec"]["ports"]
    assert {**job["spec"], "template": None} == {**written["spec"], "template": None}
    assert pod["volumes"] == written["spec"]["template"]["spec"]["volumes"]


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
        "import sys; from pathlib import Path; from biphasic.study.executors import ThisMachine\n"
        "sys.exit(ThisMachine(2).train(Path('run.yaml')))"
    )
    # No other program is needed, such as pkill.
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": str(tmp_path)}
    command = [str(shutil.which("nohup")), sys.executable, "-c", code]
    study = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert study.stdout is not None
    assert study.stdout.readline().strip() == "arguments ['-n', '2', '-m', 'biphasic.main', 'run.yaml']"
    assert study.stdout.readline() == "up\n"
    study.send_signal(signal.SIGHUP)  # ignored, because of nohup
    with pytest.raises(subprocess.TimeoutExpired):
        study.wait(2)
    start = time.monotonic()
    study.send_signal(signal.SIGTERM)
    assert study.wait(30) == 75 and time.monotonic() - start < 20
