"""A sweep whose driver is killed, for real and again: each trial is trained once, and has one record."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.storage import store
from biphasic.sweep.records import read_grid, read_records

DRIVE = [sys.executable, str(Path(__file__).with_name("drive.py"))]
TRIALS = 60


def workers_of(log: str) -> list[int]:
    """Processes that run this test's trials. (Those of Ray that do nothing yet take a while to see that it is gone.)"""
    found = []
    for place in Path("/proc").iterdir():
        try:
            is_worker = (place / "cmdline").read_bytes().startswith(b"ray::Worker.run")
            if is_worker and log.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_three_kills(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    models = {"a": {"do": "train", "seconds": 0.15}, "b": {"do": "train", "seconds": 0.2}}
    path = write_sweep(models, seeds=list(range(TRIALS // 4)), cluster={"at_once": 2})
    log, trials = tmp_path / "log", tmp_path / "out" / "trials"
    draw = random.Random(7)

    def count() -> int:
        return len(list(trials.glob("*.json"))) if trials.is_dir() else 0

    for kill in range(3):
        driver = subprocess.Popen([*DRIVE, str(path)], start_new_session=True)
        wanted, deadline = min(count() + draw.randint(3, 15), TRIALS - 3), time.monotonic() + 60
        while count() < wanted and time.monotonic() < deadline:
            time.sleep(0.003)
        time.sleep(draw.uniform(0, 0.2))
        driver.kill()
        driver.wait()
        # Nobody trains beside the next one, or writes what it has begun.
        time.sleep(0.2)
        before = log.read_text()
        time.sleep(0.6)
        assert log.read_text() == before, f"kill {kill}: a worker goes on"
    assert 9 <= count() < TRIALS
    done = {file.name: file.stat().st_mtime_ns for file in trials.glob("*.json")}

    said = subprocess.run([*DRIVE, str(path)], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"{TRIALS} of {TRIALS} trials done, 0 failed, 0 left" in said.stdout

    config = load(path)
    assert isinstance(config, SweepConfig)
    place = store(config.output)
    grid = read_grid(place)
    records = read_records(place, grid.trials)
    assert len(grid.trials) == TRIALS and records.keys() == grid.trials.keys()
    assert all(record.status == "done" and record.cell == grid.trials[name] for name, record in records.items())
    assert count() == TRIALS
    trained = Counter(line.split()[1] for line in log.read_text().splitlines() if line.startswith("trained "))
    assert len(trained) == TRIALS
    # A kill can fall between a trial's last line and its record; a trial with a record is never run again.
    twice = [name for name, times in trained.items() if times > 1]
    assert sum(trained.values()) <= TRIALS + 6 and len(twice) <= 6, trained
    assert all((trials / name).stat().st_mtime_ns == when for name, when in done.items())
    begun = Counter(line.split()[1] for line in log.read_text().splitlines() if line.startswith("began "))
    assert sum(begun.values()) <= TRIALS + 3 * 2, "each kill costs the two that were running"
    assert list((tmp_path / "out").rglob("claims/*")) == []
    deadline = time.monotonic() + 15
    while workers_of(str(log)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers_of(str(log)) == []


def test_a_worker_outlives_nothing(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    """SIGKILL to the driver in the middle of long trials: its workers are gone."""
    path = write_sweep({"m": {"do": "sleep", "seconds": 100}}, cluster={"at_once": 2})
    driver = subprocess.Popen([*DRIVE, str(path)], start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers_of(str(tmp_path / "log"))
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 1
    while workers_of(str(tmp_path / "log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(str(tmp_path / "log")) == []
