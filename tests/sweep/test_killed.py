"""A sweep whose driver is killed: its workers die with it, and every trial has one record in the end."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from biphasic.checkpointing.run_lock import LOCK_FILE
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.storage import open_store
from biphasic.sweep.records import read_grid, read_records, recorded_trials
from helpers.small_trials import read_log

DRIVE = [sys.executable, "-m", "helpers.drive_sweep"]


def workers_of(folder: Path) -> list[int]:
    """The processes of this test's sweep, except its driver: the workers, and the process that forks them."""

    def is_worker(process: Path) -> bool:
        try:
            return str(folder).encode() in (process / "environ").read_bytes() and (
                b"multiprocessing.forkserver" in (process / "cmdline").read_bytes()
            )
        except OSError:
            return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if is_worker(process)]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def require_complete(config: SweepConfig, log: Path) -> None:
    """Every trial of the grid has one record, and the last driver has ended cleanly."""
    folder = open_store(config.output)
    grid = read_grid(folder)
    records = read_records(folder, grid.trials)
    assert records.keys() == grid.trials.keys() == set(recorded_trials(folder))
    assert all(record.status == "done" and record.cell == grid.trials[name] for name, record in records.items())
    # A worker's threads are its share of the cores.
    assert all(record.about["threads"] == [1, "1", "1", "false"] for record in records.values())
    assert set(read_log(log, "trained")) == {f"sst2-{c.model}-{c.lr:g}-{c.seed}" for c in grid.trials.values()}
    assert folder.stat(LOCK_FILE) is None


def test_each_trial_has_one_record_after_sigkill(
    write_sweep: Callable[..., Path], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is killed while both of its workers are in the middle of a trial."""
    monkeypatch.setenv("SWEEP_TEST", str(tmp_path))  # `workers_of` looks for it
    models = {"a": {"do": "train"}, "b": {"do": "hang", "mended": str(tmp_path / "mended")}}
    path = write_sweep(models, cluster={"at_once": 2})
    config = load(path)
    assert isinstance(config, SweepConfig)
    driver = subprocess.Popen([*DRIVE, str(path)], start_new_session=True)
    assert wait_until(lambda: len(read_log(log, "started")) == 4, 60)
    assert len(workers_of(tmp_path)) == 3
    driver.kill()
    driver.wait()
    assert wait_until(lambda: workers_of(tmp_path) == [], 5), "a worker outlives its driver"
    (tmp_path / "mended").touch()
    trials = tmp_path / "out" / "trials"
    written = {file.name: file.stat().st_mtime_ns for file in trials.iterdir()}
    assert len(written) == 2

    last = subprocess.run([*DRIVE, str(path)], capture_output=True, text=True, timeout=120)
    assert last.returncode == 0, last.stdout + last.stderr
    assert "8 of 8 trials done, 0 failed, 0 left" in last.stdout
    require_complete(config, log)
    # Every trial was trained once; the two that were running at the kill were started again.
    assert len(read_log(log, "trained")) == 8 and len(read_log(log, "started")) == 10
    assert all((trials / name).stat().st_mtime_ns == when for name, when in written.items())


@pytest.mark.slow
def test_three_kills_at_random_moments(
    write_sweep: Callable[..., Path], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_TEST", str(tmp_path))
    models = {"a": {"do": "train", "seconds": 0.15}, "b": {"do": "train", "seconds": 0.2}}
    path = write_sweep(models, seeds=list(range(15)), cluster={"at_once": 2})
    trials = tmp_path / "out" / "trials"
    config = load(path)
    assert isinstance(config, SweepConfig)
    draw = random.Random(7)

    def recorded() -> list[Path]:
        """The files of records; a kill may leave one that is being written, whose name begins with a dot."""
        return [file for file in trials.glob("*.json") if not file.name.startswith(".")]

    for kill in range(3):
        driver = subprocess.Popen([*DRIVE, str(path)], start_new_session=True)
        target = min(len(recorded()) + draw.randint(3, 15), 57)
        assert wait_until(lambda target=target: len(recorded()) >= target, 60)
        time.sleep(draw.uniform(0, 0.2))
        driver.kill()
        driver.wait()
        assert wait_until(lambda: workers_of(tmp_path) == [], 5)
        before = log.read_text()
        time.sleep(0.6)
        assert log.read_text() == before, f"a worker continues after kill {kill}"
    assert 9 <= len(recorded()) < 60
    written = {file.name: file.stat().st_mtime_ns for file in recorded()}
    last = subprocess.run([*DRIVE, str(path)], capture_output=True, text=True, timeout=120)
    assert last.returncode == 0, last.stdout + last.stderr
    require_complete(config, log)
    assert all((trials / name).stat().st_mtime_ns == when for name, when in written.items())
    # A kill costs the two trials that were running. It can fall between a trial's training and its record.
    trained = Counter(read_log(log, "trained"))
    assert sum(times > 1 for times in trained.values()) <= 6
    assert len(read_log(log, "started")) <= 66
