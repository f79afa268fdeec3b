"""Sweeps of small trials, and the driver by itself."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.sweep import SweepCluster, SweepConfig
from biphasic.errors import PREEMPTED, UserError
from biphasic.finetuning.records import DownstreamResult, TrialResult
from biphasic.storage import open_store
from biphasic.sweep.grid import build_grid, trial_configs
from biphasic.sweep.plan import device_seconds, plan_sweep
from biphasic.sweep.records import GRID_FILE, TrialRecord, read_grid, read_records, record_file, recorded_trials
from biphasic.sweep.run import Driver, run
from biphasic.sweep.workers import FinishedJob, TrialJob, Worker, choose_layout
from biphasic.workers.group import EndedJob
from conftest import MakeBucket
from helpers import small_trials
from helpers.small_trials import read_log
from helpers.sweeps import grid_of
from helpers.sweeps import records_of as scored_records

LoadSweep = Callable[..., SweepConfig]
DRIVE = [sys.executable, "-m", "helpers.drive_sweep"]


def records_of(config: SweepConfig) -> dict[str, TrialRecord]:
    folder = open_store(config.output)
    return read_records(folder, read_grid(folder).trials)


def test_failed_and_killed_trials(sweep: LoadSweep, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model fails, one kills its worker once, one always. Then again, and with --retry-failed."""
    mended = tmp_path / "mended"
    models = {
        "good": {"do": "train"},
        "bad": {"do": "fail", "mended": str(mended)},
        "dies": {"do": "die", "times": 1},
        "deadly": {"do": "die", "times": 9},
    }
    config = sweep(models, learning_rates=[1e-5], seeds=[0], cluster={"retries": 1, "at_once": 2})
    assert run(config, module="helpers.small_trials") == 1
    records = {record.cell.model: record for record in records_of(config).values()}
    assert records.keys() == models.keys()
    assert {model for model, record in records.items() if record.status == "failed"} == {"bad", "deadly"}
    assert records["bad"].error == "ValueError: no such luck"
    assert "raise ValueError" in records["bad"].about["traceback"]
    assert (records["deadly"].error or "").startswith("its worker died 2 times; ")
    assert records["dies"].about["attempt"] == 1
    assert records["good"].about["trials_on_device"] == 2
    assert Counter(read_log(log, "trained")) == {"sst2-good-1e-05-0": 1, "sst2-dies-1e-05-0": 1}
    output = capsys.readouterr().out
    assert "2 of 4 trials done, 2 failed, 0 left" in output and f"biphasic report {config.output}" in output
    assert "dies lr 1e-05 seed 0: its worker died; another worker runs the trial" in output

    started = len(read_log(log, "started"))
    assert run(config, module="helpers.small_trials") == 1
    assert len(read_log(log, "started")) == started, "a trial with a record ran again"

    mended.touch()
    config = sweep({**models, "deadly": {"do": "train", "seconds": 0}}, learning_rates=[1e-5], seeds=[0])
    assert run(config, retry_failed=True, module="helpers.small_trials") == 0
    assert Counter(record.status for record in records_of(config).values()) == {"done": 4}
    # Done trials stay, the failed one runs again, and the changed model's trials are new ones.
    again = read_log(log, "started")[started:]
    assert sorted(again) == ["sst2-bad-1e-05-0", "sst2-deadly-1e-05-0"]
    assert not (Path(config.output) / "lock.json").exists()


def test_a_process_whose_gpu_has_failed_runs_no_further_trial(
    sweep: LoadSweep, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model's trial breaks its worker once, and the other's always."""
    models = {"once": {"do": "break", "times": 1}, "always": {"do": "break", "times": 9}, "good": {"do": "train"}}
    config = sweep(models, learning_rates=[1e-5], seeds=[0], cluster={"at_once": 1, "retries": 1})
    assert run(config, module="helpers.small_trials") == 1
    records = {record.cell.model: record for record in records_of(config).values()}
    assert {model: record.status for model, record in records.items()} == {
        "once": "done",
        "always": "failed",
        "good": "done",
    }
    error = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert records["always"].error == error and "raise torch.AcceleratorError" in records["always"].about["traceback"]
    assert records["once"].about["attempt"] == 1
    broken = read_log(log, "broken")
    assert len(broken) == 3 and str(records["good"].about["pid"]) not in broken
    message = "its GPU failed (CUDA error: an illegal memory access was encountered); another worker runs the trial"
    assert capsys.readouterr().out.count(message) == 2


@pytest.mark.parametrize("dead", [1, 2])
def test_a_gpu_that_cannot_be_used_runs_no_trial(
    sweep: LoadSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dead: int
) -> None:
    folder = tmp_path / "dead"
    folder.mkdir()
    for number in range(dead):
        (folder / str(number)).touch()
    monkeypatch.setenv("DEAD_GPUS", str(folder))
    config = sweep({"good": {"do": "train"}}, learning_rates=[1e-5], seeds=[0, 1], cluster={"at_once": 2})
    message = f"{socket.gethostname()}, GPU : CUDA unknown error (CUDA_VISIBLE_DEVICES= runs trials on CPUs)"
    if dead == 1:
        assert run(config, module="helpers.trials_on_dead_gpus") == 0
        assert f"WARNING: a worker can't be used, and the others go on: {message}" in capsys.readouterr().out
    else:
        with pytest.raises(UserError) as caught:
            run(config, module="helpers.trials_on_dead_gpus")
        assert str(caught.value) == f"no worker can be used: {message}"
        assert not records_of(config)


def test_limit_and_plan(sweep: LoadSweep, log: Path) -> None:
    config = sweep({"a": {"do": "train"}, "b": {"do": "train"}}, cluster={"at_once": 1}, cost={"dollars_per_hour": 7200})
    before = plan_sweep(config, "helpers.small_trials")
    left = {"done": 0, "failed": 0, "left": 4}
    assert before.details["trials"] == {"all": {**left, "left": 8}, "sst2 of a": left, "sst2 of b": left}
    assert before.details["device_hours"] is None
    assert "are not known before some trials have run" in before.lines["time"]
    assert not Path(config.output).exists(), "a plan writes nothing"
    assert run(config, limit=2, module="helpers.small_trials") == 0
    # Seed by seed: both rates of the first model.
    assert sorted(read_log(log, "trained")) == ["sst2-a-1e-05-0", "sst2-a-2e-05-0"]
    after = plan_sweep(config, "helpers.small_trials")
    assert after.details["trials"] == {
        "all": {"done": 2, "failed": 0, "left": 6},
        "sst2 of a": {"done": 2, "failed": 0, "left": 2},
        "sst2 of b": left,
    }
    seconds = [record.seconds["total"] for record in records_of(config).values()]
    assert after.details["device_hours"] == pytest.approx(6 * sum(seconds) / 2 / 3600)
    assert after.details["dollars"] == pytest.approx(6 * sum(seconds))
    assert "8 trials: 2 done, 6 left" in after.describe()
    Path(config.models["b"].path).unlink()
    missing = plan_sweep(config, "helpers.small_trials")
    assert "b.model: is not there" in missing.problems[0]


def test_durations_are_estimated_from_done_trials() -> None:
    """Two trials took 10 seconds each on a shared device. A failed trial had a device alone, and doesn't count."""
    grid = grid_of(models=("a", "b"))
    first, second, failed, *rest = scored_records(grid, lambda cell, name: (0.5, 0.5)).values()
    records = [
        *(replace(record, about={"trials_on_device": 2}) for record in (first, second)),
        replace(failed, status="failed", seconds={"total": 100.0}, about={"trials_on_device": 1}),
    ]
    of_b = next(record for record in rest if record.cell.model == "b")
    records.append(replace(of_b, seconds={"total": 60.0}))
    cells = [record.cell for record in rest if record.cell.model == "a"]
    found = {record.trial: record for record in records}
    assert device_seconds(found, cells[:4]) == 4 * 5
    unknown = replace(cells[0], model="c")
    assert device_seconds(found, [of_b.cell, unknown]) == 60 + (5 + 5 + 60) / 3
    assert device_seconds({}, cells) is None


def test_other_seeds_run_at_the_chosen_rate(sweep: LoadSweep, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"a": {"do": "train"}, "b": {"do": "train", "x": 1}}
    config = sweep(models, seeds=[0, 1, 2], rate_seeds=1, cluster={"at_once": 1})

    def left() -> list[int]:
        trials = plan_sweep(config, "helpers.small_trials").details["trials"]
        return [trials[f"sst2 of {model}"]["left"] for model in models]

    assert left() == [4, 4]
    assert run(config, limit=3, module="helpers.small_trials") == 0
    assert left() == [2, 3]
    assert run(config, module="helpers.small_trials") == 0
    best = sorted({record.cell.lr for record in records_of(config).values() if record.cell.seed})
    assert len(best) == 1, "the trials' scores depend on nothing but rate and seed"
    expected = [f"sst2-{model}-{lr:g}-0" for model in models for lr in (1e-5, 2e-5)]
    expected += [f"sst2-{model}-{best[0]:g}-{seed}" for model in models for seed in (1, 2)]
    assert sorted(read_log(log, "trained")) == sorted(expected)
    assert len(records_of(config)) == 8 and "8 of 8 trials done, 0 failed, 0 left" in capsys.readouterr().out
    assert left() == [0, 0]
    assert run(config, module="helpers.small_trials") == 0
    assert len(read_log(log, "started")) == len(expected)


def test_records_in_a_bucket(sweep: LoadSweep, log: Path, store: MakeBucket) -> None:
    output = f"{store('sweeps')}/one"
    config = sweep({"m": {"do": "train"}}, learning_rates=[1e-5], output=output, cluster={"at_once": 2})
    assert run(config, module="helpers.small_trials") == 0
    assert sorted(read_log(log, "trained")) == ["sst2-m-1e-05-0", "sst2-m-1e-05-1"]
    assert Counter(record.status for record in records_of(config).values()) == {"done": 2}
    folder = open_store(config.output)
    names = {name for name in folder.list() if not name.startswith("attempts/")}
    assert names == {GRID_FILE, *(record_file(trial) for trial in read_grid(folder).trials)}
    assert run(config, module="helpers.small_trials") == 0
    assert len(read_log(log, "started")) == 2


@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)],
)
def test_one_driver_at_a_time_until_a_signal_stops_it(
    write_sweep: Callable[..., Path], log: Path, number: signal.Signals, to_group: bool
) -> None:
    """Ctrl-C goes to the whole foreground group: it must not become the error of a trial."""
    other = load(write_sweep({"other": {"do": "train"}}, learning_rates=[1e-5], cluster={"at_once": 2}))
    assert isinstance(other, SweepConfig) and run(other, module="helpers.small_trials") == 0
    path = write_sweep({"m": {"do": "hang"}}, cluster={"at_once": 2})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    driver = subprocess.Popen([*DRIVE, str(path)], **pipes, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(read_log(log, "started")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    config = load(path)
    assert isinstance(config, SweepConfig)
    lock = Path(config.output) / "lock.json"
    with pytest.raises(UserError, match=r"^output .*/out is locked by a running process: process .*another output$"):
        run(config, module="helpers.small_trials")
    # Nothing is missing in the other grid, which must not replace the running one's.
    with pytest.raises(UserError, match="is locked by a running process"):
        run(other, module="helpers.small_trials")
    assert read_grid(open_store(config.output)).models == ("m",)
    (os.killpg if to_group else os.kill)(driver.pid, number)
    output = driver.communicate(timeout=30)[0]
    assert driver.returncode == (130 if number == signal.SIGINT else PREEMPTED), output
    assert f"{number.name}: stopped" in output
    assert records_of(config) == {} and not lock.exists()


def test_another_sweep_with_the_same_output(sweep: LoadSweep, capsys: pytest.CaptureFixture[str]) -> None:
    """Its records stay; plan and start say that the report will not have them. More seeds are the same grid."""
    first = sweep({"m": {"do": "train"}}, learning_rates=[1e-5], seeds=[0])
    assert run(first, module="helpers.small_trials") == 0
    more = sweep({"m": {"do": "train"}}, learning_rates=[1e-5])
    assert run(more, module="helpers.small_trials") == 0 and not plan_sweep(more, "helpers.small_trials").warnings
    assert "WARNING" not in capsys.readouterr().out
    for changed in (sweep({"n": {"do": "train"}}), sweep({"m": {"do": "train"}}, overrides=["batch_size=8"])):
        [warning] = plan_sweep(changed, "helpers.small_trials").warnings
        assert warning.startswith("2 records in trials/ are not of this grid (of other settings, another sweep or ")
    assert run(changed, module="helpers.small_trials") == 0
    assert f"WARNING: {changed.output}: {warning}: its report will be of this grid alone\n" in capsys.readouterr().out
    assert len(recorded_trials(open_store(changed.output))) == 2 + 4


def test_a_trial_whose_files_changed_since_it_was_named_fails(sweep: LoadSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts, or while it runs; its record would be that of the old files."""
    config = sweep(learning_rates=[1e-5], seeds=[0])
    [(cell, trial_config)] = trial_configs(config).items()
    [trial] = build_grid(config, trial_configs(config), "helpers.small_trials").trials
    worker, file = Worker("helpers.small_trials", config.output, 1, 1), Path(trial_config.model.path)
    named, trained = file.read_text(), small_trials.run_trial

    def run_one() -> TrialRecord:
        finished = worker.run(TrialJob(trial, cell, trial_config))
        assert finished.written and finished.record is not None
        return finished.record

    def train_and_change(config: FinetuneConfig) -> TrialResult:
        result = trained(config)
        file.write_text(named + " ")
        return result

    assert run_one().status == "done"
    monkeypatch.setattr(small_trials, "run_trial", train_and_change)
    assert run_one().error == f"model {file}: has changed"
    monkeypatch.undo()
    assert run_one().error == f"model {file}: has changed"
    file.write_text(named)
    assert run_one().status == "done"


def test_a_module_that_cannot_be_imported(sweep: LoadSweep) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_trials"):
        run(sweep(cluster={"at_once": 1}), module="no_such_trials")


def test_layout() -> None:
    def layout(cpus: int = 16, gpus: int = 0, **keys: Any) -> tuple[int, int, float]:
        return choose_layout(SweepCluster(**keys), cpus, gpus)

    assert layout() == (16, 16, 0.0)
    assert layout(cpus_per_trial=3) == (5, 5, 0.0)
    assert layout(at_once=4) == (4, 4, 0.0)
    assert layout(gpus=2) == (2, 1, 1.0)
    assert layout(gpus=2, trials_per_gpu=3) == (6, 3, 0.3333)
    # The YAML's number of cores holds beside GPUs too.
    assert layout(gpus=2, trials_per_gpu=3, cpus_per_trial=4) == (4, 2, 0.5)


class InlineWorkers:
    """Runs one trial at a time; `end` makes its end."""

    def __init__(self, end: Callable[[TrialJob], FinishedJob]):
        self.running: list[TrialJob] = []
        self.idle, self._end = [self], end

    def give(self, job: TrialJob, method: str, *arguments: TrialJob) -> None:
        assert (method, arguments) == ("run", (job,))
        self.running = [job]

    def wait(self, seconds: float) -> list[EndedJob]:
        ended = [EndedJob(job, self._end(job)) for job in self.running]
        self.running = []
        return ended


def driver_of(config: SweepConfig) -> Driver:
    configs = trial_configs(config)
    return Driver(build_grid(config, configs, "helpers.small_trials"), configs, open_store(config.output), 2)


def work(driver: Driver, end: Callable[[TrialJob], FinishedJob], lost: str | None = None) -> None:
    driver.work(InlineWorkers(end), SimpleNamespace(lost=lost), [])  # pyright: ignore


def done(job: TrialJob) -> FinishedJob:
    result = DownstreamResult("sst2", "sst2", "classification", "accuracy", 0.5, 0.5)
    return FinishedJob(job, TrialRecord(job.trial, job.cell, "done", (result,), seconds={"total": 1.0}), written=False)


def test_jobs_start_in_order_and_once(sweep: LoadSweep) -> None:
    driver = driver_of(sweep({"a": {"do": "train"}, "b": {"do": "fail"}}))
    workers: Any = InlineWorkers(done)

    def cells(limit: int | None = None) -> list[tuple[str, float, int]]:
        return [(job.cell.model, job.cell.lr, job.cell.seed) for job in driver.jobs(workers, limit)]

    assert cells(3) == [("a", 1e-5, 0), ("a", 2e-5, 0), ("b", 1e-5, 0)]
    assert len(cells()) == 8
    [workers.running] = [[job] for job in driver.jobs(workers, 1)]
    assert cells(1) == [("a", 2e-5, 0)], "the first one runs"


def test_records_wait_while_the_output_cannot_be_written(
    sweep: LoadSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sweep()
    driver = driver_of(config)
    blocked = Path(config.output)
    blocked.write_text("a file where the folder should be")
    monkeypatch.setattr("biphasic.sweep.run.time.sleep", lambda seconds: blocked.unlink())
    work(driver, done)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "can't" in line] == [
        f"output {config.output}: can't be written; waiting with 4 records"
    ]
    assert len(list((blocked / "trials").iterdir())) == 4


def test_a_driver_that_lost_its_lock_stops(sweep: LoadSweep) -> None:
    with pytest.raises(UserError, match="another driver has it"):
        work(driver_of(sweep()), done, lost="another driver has it")


def test_lost_workers_are_counted_by_trial(sweep: LoadSweep) -> None:
    """A trial runs again after its worker died; the third loss is its failure."""
    config = sweep(learning_rates=[1e-5])
    driver = driver_of(config)
    attempts: list[tuple[int, int]] = []

    def end(job: TrialJob) -> FinishedJob:
        attempts.append((job.cell.seed, job.attempt))
        return FinishedJob(job, lost="its GPU was full") if job.cell.seed == 0 else done(job)

    work(driver, end)
    assert attempts == [(0, 0), (0, 1), (0, 2), (1, 0)]
    errors = {record.cell.seed: record.error for record in driver.records.values()}
    assert (errors[0] or "").startswith("its GPU was full 3 times; ") and errors[1] is None
    assert {seed: replace(record, trial="").status for seed, record in enumerate(driver.records.values())} == {
        0: "failed",
        1: "done",
    }
