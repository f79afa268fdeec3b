"""Preemption: the batch is finished, saved and stored, and none is trained twice."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.claim import attempts_in
from biphasic.checkpointing.manifest import checkpoints_in
from biphasic.storage import store
from buckets import bucket_for
from conftest import Write
from tiny import ROOT, composer_command, config_of, losses, train, weights


def start(path: Path, processes: int = 1) -> subprocess.Popen[str]:
    command = composer_command(ROOT / "src" / "main.py", path, processes=processes)
    # One process computes with as many threads as this one, which it is compared with.
    threads = {"OMP_NUM_THREADS": "1"} if processes > 1 else {}
    environment = {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def wait_for_batch(folder: Path, batch: int, run: subprocess.Popen[str]) -> None:
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < batch:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0][-3000:]
        time.sleep(0.002)


def lines(folder: Path) -> list[str]:
    """One for each batch that was trained, in however many attempts."""
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss/train/total" in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_no_batch_is_trained_twice(s3: Path, write_yaml: Write, number: signal.Signals) -> None:
    whole = train(config_of(write_yaml("whole", max_duration="300ba", checkpoint__interval="1000ba")))
    place = f"s3://{bucket_for(s3, 'stopping-' + number.name)}/run"
    keys: dict[str, Any] = {"max_duration": "300ba", "checkpoint__interval": "1000ba", "data__num_workers": 1}
    path = write_yaml("stopped", checkpoint__folder=place, **keys)
    folder = whole.parent / "stopped"
    run = start(path)
    wait_for_batch(folder, random.Random(number).randrange(10, 250), run)
    if number == signal.SIGTERM:
        # As a machine that shuts down does: to every process there is.
        os.killpg(run.pid, number)
    else:
        for child in children(run.pid):
            os.kill(child, number)
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 75, said[-3000:]
    found = re.search(rf"{number.name}: saved at batch (\d+), ([\d.]+) s after it; status 75", said)
    assert found, said[-3000:]
    stopped = int(found[1])
    assert len(lines(folder)) == stopped < 300
    newest = checkpoints_in(store(place))[0]
    assert newest.manifest is not None and newest.batch == stopped
    assert attempts_in(store(place))[0]["reason"].startswith(f"{number.name}: saved at batch {stopped}")
    train(config_of(path))
    assert len(lines(folder)) == 300
    assert losses(folder) == losses(whole)
    ours, theirs = weights(folder, 300), weights(whole, 300)
    assert all((weight == theirs[name]).all() for name, weight in ours.items())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_ranks_of_which_one_is_told(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"max_duration": "200ba", "checkpoint__interval": "1000ba", "data__num_workers": 1}
    path = write_yaml("two", parallelism__strategy="fsdp", **keys)
    folder = Path(config_of(path).output) / "two"
    run = start(path, processes=2)
    wait_for_batch(folder, 20, run)
    os.kill(children(run.pid)[1], signal.SIGTERM)
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 75, said[-3000:]
    [newest, *_] = checkpoints_in(store(str(folder / "checkpoints")))
    assert newest.manifest is not None and newest.batch == len(lines(folder))


def test_within_a_validation(write_yaml: Write, dataset: Path) -> None:
    """It is not waited for."""
    validation = {"local": str(write_yaml("unused").parent / "data" / "validation")}
    keys: dict[str, Any] = {"max_duration": "40ba", "checkpoint__interval": "1000ba", "evaluation__interval": "5ba",
                            "evaluation__batch_size": 1, "data__validation": validation}  # fmt: skip
    expected = losses(train(config_of(write_yaml("whole", **keys))))
    path = write_yaml("stopped", **keys)
    folder = Path(config_of(path).output) / "stopped"
    code = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT / "tests")!r}]
from composer.core import Callback
from biphasic.training import pretrain
class Signal(Callback):
    def eval_batch_end(self, state, logger):
        if int(state.timestamp.batch) == 10 and int(state.eval_timestamp.batch) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
old = pretrain.callbacks
pretrain.callbacks = lambda *a: [Signal(), *old(*a)]
import main
sys.exit(main.main([{str(path)!r}]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 75, run.stderr[-3000:]
    assert "saved at batch 10" in run.stdout
    train(config_of(path))
    assert losses(folder) == expected


def test_a_second_signal_ends_at_once(write_yaml: Write, s3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for a bucket that is away."""
    place = f"s3://{bucket_for(s3, 'stopping-twice')}/run"
    path = write_yaml("twice", max_duration="2000ba", checkpoint__folder=place, checkpoint__interval="5000ba")
    folder = Path(config_of(path).output) / "twice"
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT / "tests")!r}]
from biphasic.storage import S3Store
def away(self, file, name):
    raise OSError("503 SlowDown")
S3Store.put = away
import main
sys.exit(main.main([{str(path)!r}]))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen([sys.executable, "-c", code], **pipes)
    wait_for_batch(folder, 3, run)
    run.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    run.send_signal(signal.SIGTERM)  # too soon: the launcher's copy of the first one
    time.sleep(2)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=5)[0]
    assert run.returncode == 128 + signal.SIGTERM, said[-2000:]
    assert "SIGTERM again: ends at once" in said
