"""Signals to a fine-tuning, and a second start of it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from biphasic.config.load import dump
from helpers import warm
from helpers.toy_sets import config_of

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SLOW = """
import time
from composer.core import Callback
from biphasic.finetuning.trainer import SeededDropout
class Slow(SeededDropout):
    def batch_end(self, state, logger):
        time.sleep(0.3)
from biphasic.finetuning import trainer
trainer.SeededDropout = Slow
"""


@pytest.fixture
def file(toy: Path, tmp_path: Path) -> Path:
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="20ba", logging__jsonl=True)
    path = tmp_path / "run.yaml"
    path.write_text(dump(config))
    return path


def start(file: Path, *overrides: str, code: str = SLOW) -> warm.Job:
    return warm.start([str(file), *overrides], 1, ENVIRONMENT, code=code)


def wait_until_it_trains(file: Path, job: warm.Job) -> None:
    end = time.monotonic() + 60
    while not any(path.stat().st_size for path in file.parent.rglob("metrics.jsonl")):
        assert job.poll() is None and time.monotonic() < end, job.wait(1)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("numbers", "status", "line"),
    [
        ([signal.SIGTERM], 75, "SIGTERM: stopped"),
        ([signal.SIGHUP], 75, "SIGHUP: stopped"),
        # As Composer's launcher does, which sees Ctrl-C in the terminal too.
        ([signal.SIGINT, signal.SIGTERM], 130, "interrupted"),
    ],
)
def test_a_signal_is_named_and_the_same_command_trains_again(
    file: Path, numbers: list[signal.Signals], status: int, line: str
) -> None:
    job = start(file)
    wait_until_it_trains(file, job)
    for number in numbers:
        os.kill(job.ranks[0], number)
    ended = job.wait(30)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.endswith(f"the same command does the rest (status {status})\n") and line in ended.stderr
    again = start(file, code="").wait()
    assert again.returncode == 0, again.stderr


def test_a_second_start_leaves_the_folder_to_the_first(file: Path) -> None:
    """Such as after a launcher that died and left its rank."""
    job = start(file)
    wait_until_it_trains(file, job)
    second = start(file).wait(60)
    assert second.returncode == 2
    assert "is locked by a running process" in second.stderr and "choose another run_name" in second.stderr
    first = job.wait()
    assert first.returncode == 0, first.stderr


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_as_the_model_is_saved(file: Path, moment: str) -> None:
    """The record comes after the model, so the next start trains again and replaces it."""
    code = f"""
import os, signal, time
from biphasic.finetuning import run
save = run._save
def interrupted(*arguments):
    if {moment == "after"}:
        save(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
run._save = interrupted
"""
    stopped = start(file, "save_model=true", code=code).wait(60)
    assert stopped.returncode == 75 and "SIGTERM: stopped" in stopped.stderr
    again = start(file, "save_model=true", code="").wait()
    assert again.returncode == 0, again.stderr
    [record] = file.parent.rglob("record.json")
    assert json.loads(record.read_text())["saved"] and (record.parent / "model" / "config.json").is_file()
