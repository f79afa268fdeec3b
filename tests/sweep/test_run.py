"""Sweeps of small trials on Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.load import load
from biphasic.config.sweep import SweepCluster, SweepConfig
from biphasic.storage import store
from biphasic.sweep.plan import describe_plan, plan_sweep
from biphasic.sweep.records import GRID, Record, read_grid, read_records, record_name
from biphasic.sweep.run import STOPPED, run
from biphasic.sweep.worker import Job
from biphasic.sweep.workers import Workers, layout

Sweep = Callable[..., SweepConfig]
DRIVE = [sys.executable, str(Path(__file__).with_name("drive.py"))]
GIB = 2**30


def records_of(config: SweepConfig) -> dict[str, Record]:
    place = store(config.output)
    return read_records(place, read_grid(place).trials)


def logged(what: str) -> list[str]:
    from small_trials import lines  # pyright: ignore

    return lines(what)


def test_failures_deaths_and_copies(sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fails, one dies once, one always, two are the same; then again, and again with the failed ones."""
    mended = tmp_path / "mended"
    models = {
        "good": {"do": "train"},
        "bad": {"do": "fail", "mended": str(mended)},
        "dies": {"do": "die", "times": 1},
        "deadly": {"do": "die", "times": 9},
        "same": {"do": "train"},
    }
    config = sweep(models, learning_rates=[1e-5], cluster={"retries": 1, "at_once": 2})
    assert run(config, module="small_trials") == 1
    found = {(one.cell.model, one.cell.seed): one for one in records_of(config).values()}
    assert len(found) == 10
    status = {key: one.status for key, one in found.items()}
    assert sorted(key for key, value in status.items() if value == "failed") == [
        ("bad", 0),
        ("deadly", 0),
        ("deadly", 1),
    ]
    assert found["bad", 0].error == "ValueError: no such luck"
    assert "raise ValueError" in found["bad", 0].about["traceback"]
    assert found["deadly", 0].error is not None and found["deadly", 0].error.startswith("its worker died 2 times; ")
    assert found["dies", 0].about["attempt"] == 1
    # A worker's threads are its share of the cores.
    assert found["good", 0].about["threads"][:4] == [1, "1", "1", "false"]
    assert "trials_on_device" in found["good", 0].about
    # The same content under two names is trained once, and has two records.
    copy = found["same", 0]
    assert copy.about["copy_of"] == found["good", 0].trial and copy.results == found["good", 0].results
    trained = Counter(logged("trained"))
    assert trained == {f"sst2-{model}-1e-05-{seed}": 1 for model, seed in
                       [("good", 0), ("good", 1), ("bad", 1), ("dies", 0), ("dies", 1)]}  # fmt: skip
    said = capsys.readouterr().out
    assert "7 of 10 trials done, 3 failed, 0 left" in said and f"python -m biphasic.report {config.output}" in said
    assert "dies lr 1e-05 seed 0: its worker died; it is given to another one" in said

    begun = len(logged("began"))
    assert run(config, module="small_trials") == 1
    assert len(logged("began")) == begun, "nothing is run again"

    mended.touch()
    config = sweep({**models, "deadly": {"do": "train", "seconds": 0}}, learning_rates=[1e-5])
    assert run(config, retry_failed=True, module="small_trials") == 0
    assert Counter(one.status for one in records_of(config).values()) == {"done": 10}
    # What was done stays; the failed one is run again; a model that was changed makes other trials.
    again = logged("began")[begun:]
    assert sorted(again) == ["sst2-bad-1e-05-0", "sst2-deadly-1e-05-0", "sst2-deadly-1e-05-1"]
    assert list(Path(config.output).rglob("claims/*")) == []


def test_limit_and_plan(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"dollars_per_hour": 2.0, "flops_per_second": 1e3}
    config = sweep({"a": {"do": "train"}, "b": {"do": "train", "x": 1}}, cluster={"at_once": 1}, cost=cost)
    before = plan_sweep(config, "small_trials")
    assert [(line.left, line.source, line.device_hours) for line in before.lines] == [(4, "FLOPs", 8.0)] * 2
    assert (before.device_hours, before.dollars, before.unknown) == (16.0, 32.0, 0)
    assert not Path(config.output).exists(), "a plan writes nothing"
    assert run(config, limit=2, module="small_trials") == 0
    # Seed by seed: both rates of the first model.
    assert sorted(logged("trained")) == ["sst2-a-1e-05-0", "sst2-a-2e-05-0"]
    after = plan_sweep(config, "small_trials")
    assert [(line.done, line.left, line.source) for line in after.lines] == [(2, 2, "recorded"), (0, 4, "FLOPs")]
    of_a = [one.seconds["total"] for one in records_of(config).values()]
    assert after.lines[0].device_hours == pytest.approx(sum(of_a) / 3600)
    unknown = plan_sweep(config.model_copy(update={"cost": None}), "small_trials")
    assert unknown.unknown == 4 and "4 trials of unknown length" in describe_plan(unknown)
    Path(config.models["b"].path).unlink()
    missing = plan_sweep(config, "small_trials")
    assert missing.faults is not None and "b.model: is not there" in missing.faults


def test_records_in_a_bucket(sweep: Sweep, s3: Path) -> None:
    (s3 / "sweeps").mkdir()
    config = sweep({"m": {"do": "train"}}, learning_rates=[1e-5], output="s3://sweeps/one")
    assert run(config, module="small_trials") == 0
    assert sorted(logged("trained")) == ["sst2-m-1e-05-0", "sst2-m-1e-05-1"]
    assert Counter(one.status for one in records_of(config).values()) == {"done": 2}
    place = store(config.output)
    assert set(place.list()) == {GRID, *(record_name(trial) for trial in read_grid(place).trials)}
    assert run(config, module="small_trials") == 0
    assert len(logged("began")) == 2


def test_two_drivers_share(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    path = write_sweep({"m": {"do": "train", "seconds": 0.3}}, seeds=list(range(12)), cluster={"at_once": 1})
    drivers = [subprocess.Popen([*DRIVE, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0]
    config = load(path)
    assert isinstance(config, SweepConfig)
    assert Counter(one.status for one in records_of(config).values()) == {"done": 24}
    assert set(Counter(logged("trained")).values()) == {1} and len(logged("trained")) == 24
    assert len(logged("began")) == 24
    # Each has done some of them, and heard of the others.
    ours = [text.count(": sst2 accuracy") - text.count("by another driver") for text in said]
    assert sum(ours) == 24 and min(ours) >= 3, said
    assert all("24 of 24 trials done" in text for text in said)


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_driver_that_is_asked_to_stop(
    write_sweep: Callable[..., Path], tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    """Ctrl-C goes to the whole foreground group: it must not become the error of a trial."""
    path = write_sweep({"m": {"do": "sleep", "seconds": 60}}, cluster={"at_once": 2})
    driver = subprocess.Popen([*DRIVE, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(logged("began")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list((tmp_path / "out" / "claims").iterdir())) == 1
    (os.killpg if group else os.kill)(driver.pid, number)
    said = driver.communicate(timeout=30)[0]
    assert driver.returncode == STOPPED, said
    assert f"{number.name}: stopped" in said
    config = load(path)
    assert isinstance(config, SweepConfig)
    assert records_of(config) == {} and list((tmp_path / "out").rglob("claims/*")) == []


def test_a_module_that_cannot_be_imported(sweep: Sweep) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_trials"):
        run(sweep(), module="no_such_trials")


def test_layout() -> None:
    def slots(cpus: int = 16, gpus: int = 0, memory: int | None = None, needs: Any = (), **keys: Any) -> Any:
        found = layout(SweepCluster(**keys), cpus, gpus, memory, list(needs))
        return found.slots, found.per_device, found.share_of_gpu, found.gpu_bytes

    assert slots() == (16, 16, 0.0, None)
    assert slots(cpus_per_trial=3) == (5, 5, 0.0, None)
    assert slots(at_once=4) == (4, 4, 0.0, None)
    assert slots(gpus=2, trials_per_gpu=3) == (6, 3, 0.3333, None)
    # The YAML's number of cores holds beside GPUs too.
    assert slots(gpus=2, trials_per_gpu=3, cpus_per_trial=4) == (4, 2, 0.5, None)
    assert slots(gpus=2, memory=80 * GIB, needs=[10 * GIB, 30 * GIB, None]) == (12, 6, 0.1666, 80 * GIB)
    assert slots(gpus=2, memory=80 * GIB, needs=[None]) == (2, 1, 1.0, None)
    assert slots(gpus=2, needs=[]) == (2, 1, 1.0, None)
    assert slots(gpus=1, memory=8 * GIB, needs=[30 * GIB]) == (1, 1, 1.0, None)


def test_trials_on_gpus_fit_their_memory() -> None:
    """Which jobs may begin, without a GPU: a worker's place is all that counts."""
    from biphasic.sweep.workers import _Slot

    class Slot(_Slot):
        def __init__(self, where: Any):
            self.where, self.job, self.waiting = where, None, None

    workers = Workers.__new__(Workers)
    workers._layout = layout(SweepCluster(), 16, 2, 80 * GIB, [10 * GIB])
    workers._slots = [Slot(place) for place in ("first", "second") for _ in range(6)]

    def jobs(*sizes: int | None) -> list[Job]:
        return [Job(str(at), None, None, size and size * GIB) for at, size in enumerate(sizes)]  # pyright: ignore

    def room(*sizes: int | None) -> int:
        return len(workers.room(jobs(*sizes)))

    assert room(*[10] * 20) == 12
    assert room(60, 60, 60) == 2
    assert room(60, 10, 60, 10, 10) == 4, "60 and 10 on each"
    assert room(60, 60, 30, 1) == 2, "the large one isn't overtaken"
    assert room(None, None, 10) == 2, "of unknown size: a GPU each"
    assert room(200) == 1, "what fits nowhere is tried alone"


def test_what_may_begin(sweep: Sweep) -> None:
    from biphasic.sweep.grid import configurations, functions_of, make
    from biphasic.sweep.run import Driver

    class Nobody:
        """Workers and claims of none."""

        running: list[Job] = []
        elsewhere: set[str] = set()

    config = sweep({"a": {"do": "train"}, "same": {"do": "train"}, "b": {"do": "fail"}})
    made = make(config, configurations(config), functions_of("small_trials"))
    driver, nobody = Driver(config, made, store(config.output), {}), Nobody()

    def begins(limit: int | None = None) -> list[tuple[str, float, int]]:
        jobs = driver._jobs(nobody, nobody, limit)  # pyright: ignore
        return [(job.cell.model, job.cell.lr, job.cell.seed) for job in jobs]

    assert begins(3) == [("a", 1e-5, 0), ("a", 2e-5, 0), ("b", 1e-5, 0)], "one of each content"
    assert len(begins()) == 8
    nobody.elsewhere = {next(name for name, cell in made.grid.trials.items() if cell.model == "same")}
    assert begins(1) == [("a", 2e-5, 0)], "what another driver runs under another name"
