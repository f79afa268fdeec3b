"""Preemption: the batch is finished, saved and uploaded, and none is trained twice."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import pytest

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.checkpointing.run_lock import read_attempts
from biphasic.checkpointing.stopping import StopCoordinator
from biphasic.model.checkpoint import read_record
from biphasic.storage import open_store
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.buckets import bucket_for
from helpers.tiny import (
    ROOT,
    composer_command,
    config_of,
    keep_checkpoints_up_to,
    launch,
    losses,
    start,
    train_alone,
    wait_for_batch,
    weights,
)


def trained_batches(folder: Path) -> list[str]:
    """A line for each batch that was trained, by any number of attempts."""
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss/train/total" in line]


def assert_stopped_and_saved(output: str, name: str, destination: str, folder: Path) -> None:
    match = re.search(rf"{name}: saved at batch (\d+), ([\d.]+) s after the request; status 75", output)
    assert match, output[-3000:]
    batch = int(match[1])
    assert len(trained_batches(folder)) == batch
    newest = list_checkpoints(open_store(destination))[0]
    assert newest.manifest is not None and newest.batch == batch
    assert read_attempts(open_store(destination))[0]["reason"].startswith(f"{name}: saved at batch {batch}")


def test_sigterm_to_all_processes_repeats_no_batch(s3: Path, write_yaml: Write) -> None:
    """Composer's launcher, its rank and the loader process receive the signal, as when a machine shuts down.

    The stopped run doesn't import `helpers.tiny`, which replaces parts of Streaming, so its teardown is the shipped one.
    """
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


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_a_signal_to_one_of_two_ranks_stops_both(s3: Path, write_yaml: Write, name: str) -> None:
    destination = f"s3://{bucket_for(s3, f'stopping-{name.lower()}')}/run"
    path = write_yaml("stopped", max_duration="200ba", checkpoint__interval="1000ba", data__num_workers=1,
                      parallelism__strategy="fsdp", checkpoint__folder=destination)  # fmt: skip
    folder = Path(config_of(path).output) / "stopped"
    job = start(path, processes=2)
    wait_for_batch(folder, 11, job)
    os.kill(job.ranks[1], signal.Signals[name])
    run = job.wait(60)
    assert run.returncode == 75, run.stderr[-3000:]
    assert_stopped_and_saved(run.stdout, name, destination, folder)


SIGNAL_IN_VALIDATION = """
import os, signal
from helpers import tiny
from composer.core import Callback
class Signal(Callback):
    def eval_batch_end(self, state, logger):
        if int(state.timestamp.batch) == {batch} and int(state.eval_timestamp.batch) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
tiny.add_callback(Signal())
"""


SIGNAL_IN_BATCH = SIGNAL_IN_VALIDATION.replace("eval_batch_end", "batch_start").replace(
    "== {batch} and int(state.eval_timestamp.batch) == 3", "== {batch} - 1"
)


def validated(write_yaml: Write, tmp: Path, name: str, **changes: Any) -> Path:
    """The YAML of a run of 20 batches whose interval of validation doesn't divide it."""
    keys: dict[str, Any] = {"max_duration": "20ba", "checkpoint__interval": "1000ba", "schedule": {},
                            "evaluation__interval": "7ba", "evaluation__batch_size": 2,
                            "objective__phases": [{"name": "clm", "until": "14ba"}, {"name": "mlm"}]}  # fmt: skip
    return write_yaml(name, **keys, **changes, data__validation={"local": str(tmp / "data" / "validation")})


def recorded_losses(checkpoint: Path) -> dict[str, float]:
    """The losses in a checkpoint's record, from which its model card is written."""
    return read_record(str(checkpoint))["losses"]


@pytest.mark.parametrize("batch", [14, 20], ids=["at the switch", "at the end"])
@pytest.mark.parametrize("code", [SIGNAL_IN_VALIDATION, SIGNAL_IN_BATCH], ids=["within it", "in the batch before it"])
def test_an_interrupted_validation_is_repeated_and_saved(write_yaml: Write, tmp_path: Path, batch: int, code: str) -> None:
    assert launch(validated(write_yaml, tmp_path, "uninterrupted")).returncode == 0
    path = validated(write_yaml, tmp_path, "stopped")
    runs = Path(config_of(path).output)
    folder = runs / "stopped" / "checkpoints"
    run = launch(path, "logging.progress_bar=true", code=code.format(batch=batch))
    assert run.returncode == 75, run.stderr[-3000:]
    assert f"saved at batch {batch}" in run.stdout
    checkpoint, *_ = list_checkpoints(open_store(str(folder)))
    assert checkpoint.manifest is not None and checkpoint.manifest.run["kept"] == (batch == 14)
    assert checkpoint.manifest.path == f"ba{batch}-validating-rank0.pt"
    resumed = launch(path, "logging.progress_bar=true")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    lines = [line.removeprefix("stopped: ") for line in resumed.stdout.splitlines()]
    starts = ("resuming", "starting", "repeating", "already trained")
    assert [re.sub(r", [\d.]+ s$", "", line) for line in lines if line.startswith(starts)] == [
        f"resuming at batch {batch} of 20 from {folder / checkpoint.manifest.path}",
        "repeating the validation in which the run was stopped",
        *(["already trained to 20ba"] if batch == 20 else []),
    ]
    assert f"next: biphasic export {folder} {runs / 'stopped' / 'encoder'}" in lines
    # No settings of Composer's around its bar.
    assert ("train" in resumed.stderr) == (batch < 20) and "Config:" not in resumed.stderr + resumed.stdout
    assert losses(runs / "stopped") == losses(runs / "uninterrupted")
    assert validations(runs / "stopped") == validations(runs / "uninterrupted")
    assert list(validations(runs / "stopped")) == [7, 14, 20]
    # The checkpoints are saved again with the losses, under their usual names.
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == ["ba14-rank0.pt", "ba20-rank0.pt"]
    for name in names:
        assert recorded_losses(folder / name) == recorded_losses(runs / "uninterrupted" / "checkpoints" / name)
    again = launch(path)
    assert "already trained to 20ba; nothing to do" in again.stdout and "repeating" not in again.stdout


def test_two_ranks_save_a_repeated_validation_to_a_bucket(s3: Path, write_yaml: Write, tmp_path: Path) -> None:
    """The run is killed once more before the sharded checkpoint with the losses is complete."""
    place = f"s3://{bucket_for(s3, 'stopping-validation')}/run"
    path = validated(
        write_yaml, tmp_path, "stopped", parallelism__strategy="fsdp", checkpoint__folder=place, checkpoint__keep=1
    )
    folder = Path(config_of(path).output) / "stopped"
    run = launch(path, processes=2, code=SIGNAL_IN_VALIDATION.format(batch=20))
    assert run.returncode == 75, run.stderr[-3000:]
    [newest, *_] = list_checkpoints(open_store(place))
    assert newest.manifest is not None and newest.manifest.path == "ep0-ba20-validating"
    code = """
import os
from biphasic.checkpointing import upload
def die(manifest, destination):
    os.kill(os.getpid(), 9)
upload.write_manifest = die
"""
    assert launch(path, processes=2, code=code).returncode != 0
    [newest, *_] = list_checkpoints(open_store(place))
    assert newest.manifest is not None and newest.manifest.path == "ep0-ba20-validating"
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "already trained to 20ba" in run.stdout
    names = {name.partition("/")[0] for name in open_store(place).list() if name.startswith(("ep", "ba"))}
    assert names == {"ep0-ba14", "ba14.json", "ep0-ba20", "ba20.json"}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["ep0-ba20"]
    logged = validations(folder)[20]
    recorded = recorded_losses(folder / "checkpoints" / "ep0-ba20")
    assert [recorded[f"metrics/{label}/loss"] for label in ("clm", "mlm")] == logged


def test_a_repeated_validation_has_the_measured_microbatch(write_yaml: Write, tmp_path: Path) -> None:
    """Memory is a formula instead of a GPU's: four rows fit, and a rank's validation batch has eight."""
    path = validated(write_yaml, tmp_path, "stopped", microbatch_size="auto")
    path.write_text(path.read_text().replace("batch_size: 2\n", "batch_size: 8\n"))
    code = """
from biphasic.training import compute, step
rows = []
fill, forward = compute.MicrobatchSize._batch, step.PretrainModel.eval_forward
def record(self, state, length, count, causal):
    rows.append(count)
    return fill(self, state, length, count, causal)
def report(self, batch, outputs=None):
    print("validated rows:", len(batch["input_ids"]), flush=True)
    return forward(self, batch, outputs)
compute.MicrobatchSize._batch = record
step.PretrainModel.eval_forward = report
compute._circumstances = lambda length, rows: {}
compute._missing_optimizer_state = lambda state: 1.0
compute.available_bytes = lambda: 10.0
compute.peak_bytes = lambda work: work() or 2.0 * rows[-1]
compute._is_measured = lambda config: True
"""
    stopped = launch(path, code=code + SIGNAL_IN_VALIDATION.format(batch=7).replace("== 3", "== 1"))
    assert stopped.returncode == 75, stopped.stderr[-3000:]
    resumed = launch(path, code=code)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "repeating the validation" in resumed.stdout
    sizes = {int(line.split()[-1]) for line in resumed.stdout.splitlines() if line.startswith("validated rows:")}
    assert max(sizes) == 4


def validations(folder: Path) -> dict[int, list[float]]:
    """The validation losses after each batch that has some."""
    entries = read_metrics(folder / "metrics.jsonl")
    keys = [f"metrics/{label}/loss" for label in ("clm", "mlm")]
    return {entry["batch"]: [entry[key] for key in keys] for entry in entries if any(key in entry for key in keys)}


def test_a_first_signal_after_a_fault_is_not_a_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends as a run with a fault does, and not at once."""
    stopping, none = StopCoordinator(), cast(Any, None)
    stopping.install_handlers()
    try:
        stopping.stop_for_fault("the disk is full")
        os.kill(os.getpid(), signal.SIGTERM)
        stopping.batch_end(none, none)
    finally:
        stopping.restore_handlers(ended=False)
    assert (stopping.reason, stopping.is_fault, stopping.saved) == ("the disk is full", True, False)
    output = capsys.readouterr().out
    assert "SIGTERM: the run stops after this batch without saving, because of a fault" in output
    assert "ends at once" not in output.replace("a second signal ends it at once", "")


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
    assert attempt["reason"] == "interrupted with Ctrl-C (SIGINT), before the first checkpoint"


def test_ctrl_c_in_the_last_save_says_what_was_saved(write_yaml: Write) -> None:
    path = write_yaml("interrupted", max_duration="8ba", checkpoint__interval="5ba")
    code = """
import os, signal
from biphasic.checkpointing.save import Saver
Saver._finish = lambda self: os.kill(os.getpid(), signal.SIGINT)
"""
    assert launch(path, code=code).returncode == 130
    [attempt] = read_attempts(open_store(str(Path(config_of(path).output) / "interrupted" / "checkpoints")))
    assert attempt["reason"] == "interrupted with Ctrl-C (SIGINT); the newest checkpoint is of batch 8"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_after_the_end_of_a_run_changes_nothing(write_yaml: Write, name: str) -> None:
    """Composer's launcher signals the other ranks when the first one ends."""
    path = write_yaml("finished", max_duration="8ba", checkpoint__interval="5ba")
    code = f"""
import os, signal, time
from biphasic.checkpointing.open_run import Run
close = Run.close
def close_and_signal(self, reason):
    close(self, reason)
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.3)
Run.close = close_and_signal
"""
    run = launch(path, code=code)
    assert run.returncode == 0 and "stopped" not in run.stderr, run.stderr
    [attempt] = read_attempts(open_store(str(Path(config_of(path).output) / "finished" / "checkpoints")))
    assert attempt["reason"] == "finished"


def test_a_signal_before_the_first_batch_trains_none(write_yaml: Write) -> None:
    """A new run has nothing to save, and a resumed one starts from the checkpoint that it has."""
    path = write_yaml("early", max_duration="8ba", checkpoint__interval="4ba")
    folder = Path(config_of(path).output) / "early"
    code = """
import os, signal
from biphasic.checkpointing.stopping import StopCoordinator
after_dataloader = StopCoordinator.after_dataloader
def signalled(self, state, logger):
    if int(state.timestamp.batch) % 4 == 0 and not self._has_begun:
        os.kill(os.getpid(), signal.SIGTERM)
    after_dataloader(self, state, logger)
StopCoordinator.after_dataloader = signalled
"""
    new = launch(path, processes=2, code=code)
    assert new.returncode == 75 and "stopped before batch 1, the first of this start" in new.stdout, new.stdout
    assert not list((folder / "checkpoints").glob("*.pt"))
    assert launch(path).returncode == 0
    trained = weights(folder, 8)
    keep_checkpoints_up_to(folder, 4)
    resumed = launch(path, processes=2, code=code)
    assert resumed.returncode == 75 and "stopped before batch 5, the first of this start" in resumed.stdout
    assert sorted(file.name for file in (folder / "checkpoints").glob("*.pt")) == ["ba4-rank0.pt"]
    assert launch(path).returncode == 0
    assert all((weight == trained[name]).all() for name, weight in weights(folder, 8).items())


def test_a_rank_whose_loader_was_killed_ends_soon(write_yaml: Write, tmp_path: Path) -> None:
    """The other loaders wait for it, as in Streaming's barrier, and would survive SIGTERM while the run trains."""
    path = write_yaml(max_duration="2000ba", checkpoint__interval="5000ba", data__num_workers=4)
    code = f"""
import os, pathlib, signal, time
from torch.utils.data import get_worker_info
from biphasic.data.streaming import RowDataset
read, killed = RowDataset.__getitem__, pathlib.Path({str(tmp_path / "killed")!r})
def read_or_wait(self, at):
    if killed.exists():
        if os.environ["RANK"] == "1" and get_worker_info().id == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    return read(self, at)
RowDataset.__getitem__ = read_or_wait
"""
    job, folder = start(path, processes=2, code=code), Path(config_of(path).output) / "run"
    wait_for_batch(folder, 3, job)
    (tmp_path / "killed").touch()
    begin = time.monotonic()
    run = job.wait(200)
    assert run.returncode == 1
    assert time.monotonic() - begin < 10
    [attempt] = read_attempts(open_store(str(folder / "checkpoints")))
    assert re.match(r"rank 1: RuntimeError: .*DataLoader worker \(pid \d+\) is killed by signal: Killed", attempt["reason"])
