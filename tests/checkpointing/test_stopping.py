"""Preemption: the batch is finished, saved and uploaded, and none is trained twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.checkpointing.run_lock import read_attempts
from biphasic.storage import open_store
from biphasic.training.loggers import read_metrics
from biphasic.training.objective_schedule import EVALUATIONS
from buckets import bucket_for
from conftest import Write
from tiny import ROOT, composer_command, config_of, launch, losses, start, train_alone, wait_for_batch, weights


def trained_batches(folder: Path) -> list[str]:
    """A line for each batch that was trained, by any number of attempts."""
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss/train/total" in line]


def assert_stopped_and_saved(output: str, name: str, destination: str, folder: Path) -> None:
    match = re.search(rf"{name}: saved at batch (\d+), ([\d.]+) s after it; status 75", output)
    assert match, output[-3000:]
    batch = int(match[1])
    assert len(trained_batches(folder)) == batch
    newest = list_checkpoints(open_store(destination))[0]
    assert newest.manifest is not None and newest.batch == batch
    assert read_attempts(open_store(destination))[0]["reason"].startswith(f"{name}: saved at batch {batch}")


def test_sigterm_to_all_processes_repeats_no_batch(s3: Path, write_yaml: Write) -> None:
    """Composer's launcher, its rank and the loader process receive the signal, as when a machine shuts down."""
    keys: dict[str, Any] = {"max_duration": "80ba", "checkpoint__interval": "1000ba", "data__num_workers": 1}
    uninterrupted = train_alone(write_yaml("uninterrupted", **keys))
    destination = f"s3://{bucket_for(s3, 'stopping-sigterm')}/run"
    path = write_yaml("stopped", checkpoint__folder=destination, **keys)
    command = composer_command(ROOT / "src" / "main.py", path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    folder = uninterrupted.parent / "stopped"
    wait_for_batch(folder, 17, run)
    os.killpg(run.pid, signal.SIGTERM)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 75, output[-3000:]
    assert_stopped_and_saved(output, "SIGTERM", destination, folder)
    train_alone(path)
    assert len(trained_batches(folder)) == 80
    assert losses(folder) == losses(uninterrupted)
    expected = weights(uninterrupted, 80)
    assert all((weight == expected[name]).all() for name, weight in weights(folder, 80).items())


def test_sigusr1_to_one_of_two_ranks_stops_both(s3: Path, write_yaml: Write) -> None:
    destination = f"s3://{bucket_for(s3, 'stopping-sigusr1')}/run"
    path = write_yaml("stopped", max_duration="200ba", checkpoint__interval="1000ba", data__num_workers=1,
                      parallelism__strategy="fsdp", checkpoint__folder=destination)  # fmt: skip
    folder = Path(config_of(path).output) / "stopped"
    job = start(path, processes=2)
    wait_for_batch(folder, 11, job)
    os.kill(job.ranks[1], signal.SIGUSR1)
    run = job.wait(60)
    assert run.returncode == 75, run.stderr[-3000:]
    assert_stopped_and_saved(run.stdout, "SIGUSR1", destination, folder)


@pytest.mark.parametrize("batch", [10, 20], ids=["at the switch", "at the end"])
def test_an_interrupted_validation_is_repeated(write_yaml: Write, tmp_path: Path, batch: int) -> None:
    keys: dict[str, Any] = {"max_duration": "20ba", "checkpoint__interval": "1000ba", "evaluation__interval": "5ba",
                            "evaluation__batch_size": 1,
                            "objective__phases": [{"name": "clm", "until": "10ba"}, {"name": "mlm"}],
                            "data__validation": {"local": str(tmp_path / "data" / "validation")}}  # fmt: skip
    assert launch(write_yaml("uninterrupted", **keys)).returncode == 0
    path = write_yaml("stopped", **keys)
    runs = Path(config_of(path).output)
    code = f"""
import os, signal, tiny
from composer.core import Callback
class Signal(Callback):
    def eval_batch_end(self, state, logger):
        if int(state.timestamp.batch) == {batch} and int(state.eval_timestamp.batch) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
tiny.add_callback(Signal())
"""
    run = launch(path, "logging.progress_bar=true", code=code)
    assert run.returncode == 75, run.stderr[-3000:]
    assert f"saved at batch {batch}" in run.stdout
    checkpoint, *_ = list_checkpoints(open_store(str(runs / "stopped" / "checkpoints")))
    assert checkpoint.manifest is not None and checkpoint.manifest.run["kept"] == (batch == 10)
    resumed = launch(path, "logging.progress_bar=true")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert_says_what_it_does(resumed.stdout, resumed.stderr, runs / "stopped", batch)
    assert losses(runs / "stopped") == losses(runs / "uninterrupted")
    assert validations(runs / "stopped") == validations(runs / "uninterrupted")


def validations(folder: Path) -> dict[int, list[float]]:
    """The validation losses after each batch that has some."""
    entries = read_metrics(folder / "metrics.jsonl")
    keys = [f"metrics/{label}/loss" for label in EVALUATIONS]
    found = {entry["batch"]: [entry[key] for key in keys] for entry in entries if any(key in entry for key in keys)}
    assert len(found) == 4
    return found


def assert_says_what_it_does(out: str, err: str, folder: Path, batch: int) -> None:
    """A resumed run's lines before the first batch and after the last, and no settings of Composer's around its bar."""
    lines = [line.removeprefix("stopped: ") for line in out.splitlines()]
    assert [line.split()[0] for line in lines[:4]] == ["importing", "reading", "building", "layers"]
    checkpoint = folder / "checkpoints" / f"ba{batch}-rank0.pt"
    assert re.fullmatch(rf"resuming at batch {batch} of 20 from {checkpoint}, \d+\.\d s", lines[5])
    assert lines[6] == "repeating the validation in which the run was stopped"
    assert lines[-2:] == [
        f"written to {folder}",
        f"next: biphasic export {folder / 'checkpoints'} {folder / 'encoder'}",
    ]
    assert ("train" in err) == (batch < 20) and "Config:" not in err + out


def test_a_second_signal_ends_the_run_at_once(write_yaml: Write, s3: Path) -> None:
    """While the run waits for a bucket that can't be reached."""
    destination = f"s3://{bucket_for(s3, 'stopping-twice')}/run"
    path = write_yaml("twice", max_duration="2000ba", checkpoint__folder=destination, checkpoint__interval="5000ba")
    code = """
from biphasic.checkpointing import stopping
from biphasic.storage import S3Store
def fail(self, file, name):
    raise OSError("503 SlowDown")
S3Store.upload = fail
stopping._REPEAT_SECONDS = 0.5
"""
    job = start(path, code=code)
    wait_for_batch(Path(config_of(path).output) / "twice", 3, job)
    os.kill(job.ranks[0], signal.SIGTERM)
    time.sleep(0.2)
    os.kill(job.ranks[0], signal.SIGTERM)  # too soon: the launcher's copy of the first signal
    time.sleep(0.6)
    assert job.poll() is None
    os.kill(job.ranks[0], signal.SIGTERM)
    run = job.wait(5)
    assert run.returncode == 128 + signal.SIGTERM, run.stdout[-2000:]
    assert "SIGTERM again: ends at once" in run.stdout


def test_ctrl_c_is_recorded_in_plain_words(write_yaml: Write) -> None:
    path = write_yaml("interrupted", max_duration="2000ba", checkpoint__interval="5000ba")
    job, folder = start(path), Path(config_of(path).output) / "interrupted"
    wait_for_batch(folder, 3, job)
    os.kill(job.ranks[0], signal.SIGINT)
    assert job.wait(60).returncode == 130
    [attempt] = read_attempts(open_store(str(folder / "checkpoints")))
    assert attempt["reason"] == "interrupted with Ctrl-C (SIGINT), without saving"
