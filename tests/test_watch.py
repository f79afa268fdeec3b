"""`biphasic watch`: scores of a run's checkpoints while it trains, on disk and on S3, killed, restarted and too late."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from biphasic import watch
from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.run_lock import process_id
from biphasic.commands import main
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import dump
from biphasic.durations import Duration
from biphasic.finetuning.run import run as finetune
from biphasic.storage import open_store
from biphasic.training.loggers import log_scores
from biphasic.training.metrics_file import read_scores
from biphasic.watch import Watcher, due_batches
from conftest import Write
from helpers import toy_sets, warm
from helpers.buckets import bucket_for, client
from helpers.local_trackers import keep_local
from helpers.s3_server import serve_s3
from helpers.tiny import config_of, losses, start, train, wait_for_batch

PLAIN: dict[str, Any] = {"objective__phases": [{"name": "mlm", "masking_ratio": 0.4}], "schedule__decay": "0ba"}
"""A run that saves at its interval and at its end only."""
KEY = "scores/sst2/sst2/test/accuracy"
QUICK_TRIALS = """
import os, time
import biphasic.watch, main
biphasic.watch.POLL_SECONDS = 0.1
def run_trial(self, file, attempts):
    pid = os.fork()  # a trial without the seconds of its imports
    if not pid:
        for number in (1, 2):
            os.dup2(os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if (held := os.environ["HELD_TRIAL"]) and f"{held}-" in file.read_text():
            time.sleep(600)
        os._exit(main.main([str(file)]))
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            self._pause(0.05)
        return os.waitstatus_to_exitcode(ended[1])
    except KeyboardInterrupt:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
biphasic.watch.Watcher._run_trial = run_trial
"""
STOPPED_WHILE_IT_STARTS_A_TRIAL = """
import signal
starts = []
def stop():
    starts.append(1)
    if len(starts) == 2:
        os.kill(os.getpid(), signal.SIGTERM)  # an exception that is raised here is lost
os.register_at_fork(after_in_parent=stop)
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    return toy_sets.make_sets(root, {"train": 64, "validation": 24, "test": 24})


@pytest.fixture
def task(sets: Path, tmp_path: Path) -> FinetuneConfig:
    return toy_sets.config_of("sst2", sets, tmp_path / "unused", tmp_path, max_duration="1ep")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in this process."""

    def run_trial(self: Watcher, file: Path, attempts: list[Any]) -> int:
        finetune(FinetuneConfig.model_validate(yaml.safe_load(file.read_text())))
        return 0

    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(Watcher, "_run_trial", run_trial)


def test_a_poll_reads_only_new_manifests(task: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's 999 older ones haven't changed, says the listing."""

    def write_checkpoint(batch: int) -> None:
        (tmp_path / f"ba{batch}-rank0.pt").write_text("weights")
        run = {"rows": 0, "tokens": 0, "epochs": 0}
        manifest = Manifest(batch, f"ba{batch}-rank0.pt", {f"ba{batch}-rank0.pt": (7, "hash")}, run)
        (tmp_path / manifest.name).write_bytes(manifest.to_bytes())

    for batch in (1, 2, 3):
        write_checkpoint(batch)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(watch, "recorded_config", lambda manifest: SimpleNamespace(max_duration=Duration(9, "ba")))
    read, watcher, store = list[str](), Watcher(str(tmp_path), task, every=9), type(open_store(str(tmp_path)))
    real = store.read
    monkeypatch.setattr(store, "read", lambda self, name: read.append(name) or real(self, name))

    def read_in_a_step() -> list[str]:
        read.clear()
        assert not watcher._step()
        return sorted(name for name in read if name.startswith("ba"))

    assert read_in_a_step() == ["ba1.json", "ba2.json", "ba3.json"]
    assert read_in_a_step() == []
    write_checkpoint(4)
    assert read_in_a_step() == ["ba4.json"]


def write_task(task: FinetuneConfig, folder: Path) -> Path:
    file = folder / "task.yaml"
    file.write_text(dump(task))
    return file


def start_watch(place: str, file: Path, held: str = "", code: str = "") -> warm.Job:
    """Watch a run. The trial of the checkpoint `held` does not end; `code` runs first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HELD_TRIAL": held}
    words = ["watch", place, "--task", str(file)]
    return warm.start(words, 1, environment, module="biphasic", code=QUICK_TRIALS + code)


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def scored(place: str) -> list[int]:
    return [record["batch"] for record in read_scores(open_store(place))]


@pytest.mark.parametrize(
    ("complete", "done", "every", "end", "due"),
    [
        ([1, 2, 3], [], 1, None, [1, 2, 3]),
        ([1, 2, 3], [2], 1, None, [1, 3]),
        ([500, 1000, 1500, 2000, 2500, 4200, 4500], [], 2000, None, [2000, 4200]),
        # 4000 was removed before it could be scored; 2000 has been scored and removed.
        ([2500, 4500, 5000], [2000], 2000, None, [4500]),
        ([2000, 2100, 2200], [2000], 2000, 2200, [2200]),
        ([100], [], 2000, 100, [100]),
        ([100], [100], 2000, 100, []),
    ],
)
def test_due_batches(complete: list[int], done: list[int], every: int, end: int | None, due: list[int]) -> None:
    assert due_batches(complete, done, every, end) == due


def test_beside_a_running_run(write_yaml: Write, task: FinetuneConfig, tmp_path: Path) -> None:
    """With trials in processes of their own, as shipped. The run is the same as without."""
    keys: dict[str, Any] = {"max_duration": "60ba", "checkpoint__interval": "10ba", "logging__tensorboard": True}
    alone = train(config_of(write_yaml("alone", **keys)))
    path = write_yaml("watched", **keys)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = ["watch", str(path), "--task", str(write_task(task, tmp_path)), "--every", "40ba"]
    # Beside other tests, a trial of the lowest priority takes minutes.
    code = "import biphasic.watch; biphasic.watch.POLL_SECONDS, biphasic.watch.NICENESS = 0.1, 0"
    # Before the run has started.
    watcher = warm.start(words, 1, environment, module="biphasic", code=code)
    wait_for(lambda: "the run: not started" in watcher._read("out"))
    run = start(path, code=SLOW_BATCHES)
    folder, place = alone.parent / "watched", str(alone.parent / "watched" / "checkpoints")
    output = watcher.wait().stdout
    assert run.wait().returncode == 0
    assert "the run: training" in output and "ba40: fine-tuning on sst2" in output, output
    assert "the run has finished; all scores: biphasic runs" in output
    assert "scored since this start: ba40, ba60" in output
    assert losses(folder) == losses(alone)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        path.name for path in (alone / "checkpoints").iterdir()
    } | {"scores"}
    records = read_scores(open_store(place))
    assert [record["batch"] for record in records] == [40, 60]
    for record in records:
        file = folder / "checkpoints" / f"ba{record['batch']}-rank0.pt"
        manifest = json.loads((folder / "checkpoints" / f"ba{record['batch']}.json").read_text())
        assert record["tokens"] == manifest["run"]["tokens"]
        direct = task.model_copy(update={"run_name": f"direct{record['batch']}",
                                         "model": task.model.model_copy(update={"path": str(file)})})  # fmt: skip
        trial = json.loads((finetune(direct) / "record.json").read_text())
        assert record["trial"]["results"] == trial["results"]
        assert record["scores"][KEY] == trial["results"][0]["test"]
    events = EventAccumulator(str(folder / "tensorboard" / "watched-sst2"))
    events.Reload()
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(KEY)] == [
        (record["batch"], record["scores"][KEY]) for record in records
    ]


SLOW_BATCHES = """
import time
from composer.core import Callback
from helpers.tiny import add_callback
class Slow(Callback):
    def batch_end(self, state, logger):
        time.sleep(0.05)
add_callback(Slow())
"""


def test_killed_and_stopped_on_s3(
    s3: Path, write_yaml: Write, task: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"s3://{bucket_for(s3, 'watch-kills')}/run"
    path = write_yaml("kills", max_duration="40ba", checkpoint__interval="10ba", checkpoint__folder=place, **PLAIN)
    file = write_task(task, tmp_path)
    run = start(path, code=SLOW_BATCHES)
    wait_for_batch(config_of(path).run_folder, 1, run)
    watcher = start_watch(place, file, held="ba20")
    wait_for(lambda: len(scored(place)) == 1)
    [first] = read_scores(open_store(place))
    wait_for(lambda: "ba20: fine-tuning" in watcher._read("out"))
    watcher.kill()
    assert run.wait().returncode == 0
    assert scored(place) == [10]
    # The half-done trial is repeated. SIGTERM in the one after it.
    ended = start_watch(place, file, held="ba30", code=STOPPED_WHILE_IT_STARTS_A_TRIAL).wait(60)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    assert "ba10: fine-tuning" not in ended.stdout
    assert ended.stdout.endswith("scored since this start: ba20\ninterrupted: the same command goes on from there\n")
    ended = start_watch(place, file).wait()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert scored(place) == [10, 20, 30, 40] and read_scores(open_store(place))[0] == first
    # Nothing is left to do.
    ended = start_watch(place, file).wait()
    assert ended.stdout.startswith("scored since this start: nothing\nthe run has finished")
    assert main(["runs", place]) == 0
    assert f"sst2/sst2/test/accuracy {first['scores'][KEY]:.4f}" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_that_the_run_removes_is_skipped(
    s3: Path,
    write_yaml: Write,
    task: FinetuneConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"s3://{bucket_for(s3, 'watch-retention')}/run"
    train(config_of(write_yaml("removed", checkpoint__interval="4ba", checkpoint__folder=place, **PLAIN)))
    kept = {item["Key"] for item in client().list_objects_v2(Bucket="watch-retention")["Contents"]}
    run_trial, download = Watcher._run_trial, watch.download_files

    def download_late(manifest: Any, store: Any, folder: Path) -> None:
        if manifest.batch == 4:  # the run removes a manifest first
            store.remove(["ba4.json", "ba4-rank0.pt"])
        download(manifest, store, folder)

    def run_late(self: Watcher, file: Path, attempts: list[Any]) -> int | None:
        if "ba8" in file.read_text():  # removed after the download: the trial isn't affected
            open_store(place).remove(["ba8.json", "ba8-rank0.pt"])
        return run_trial(self, file, attempts)

    monkeypatch.setattr(watch, "download_files", download_late)
    monkeypatch.setattr(Watcher, "_run_trial", run_late)
    assert Watcher(place, task).watch() == 0
    assert scored(place) == [8, 12]
    output = capsys.readouterr().out
    assert "ba4: skipped, because the run has removed or replaced it" in output and "FAILED" not in output
    left = {item["Key"] for item in client().list_objects_v2(Bucket="watch-retention")["Contents"]}
    gone = {"run/ba4.json", "run/ba4-rank0.pt", "run/ba8.json", "run/ba8-rank0.pt"}
    assert left == kept - gone | {f"run/scores/sst2/ba{batch}.json" for batch in (8, 12)}


@pytest.mark.usefixtures("quick")
def test_a_local_checkpoint_removed_in_a_trial(
    write_yaml: Write, task: FinetuneConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(config_of(write_yaml("local", checkpoint__interval="6ba", **PLAIN))) / "checkpoints"
    run_trial = Watcher._run_trial

    def run_late(self: Watcher, file: Path, attempts: list[Any]) -> int | None:
        if "ba6-rank0.pt" in file.read_text():
            open_store(str(folder)).remove(["ba6.json", "ba6-rank0.pt"])
            file.with_suffix(".log").write_text("the file is missing\n")
            return 2
        return run_trial(self, file, attempts)

    monkeypatch.setattr(Watcher, "_run_trial", run_late)
    assert Watcher(str(folder), task).watch() == 0
    assert scored(str(folder)) == [12]
    assert "ba6: skipped" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_failures_and_other_settings(
    write_yaml: Write, task: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = train(config_of(write_yaml("fails", checkpoint__interval="4ba", **PLAIN))) / "checkpoints"
    run_trial, failing = Watcher._run_trial, ["ba4-", "ba8-", "ba12-"]

    def run_some(self: Watcher, file: Path, attempts: list[Any]) -> int | None:
        if any(name in file.read_text() for name in failing):
            file.with_suffix(".log").write_text("task.data: is missing\n")
            return 2
        return run_trial(self, file, attempts)

    monkeypatch.setattr(Watcher, "_run_trial", run_some)
    words = ["watch", str(folder.parent), "--task", str(write_task(task, tmp_path))]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "task.data: is missing" in error and "the first trial failed, so no other is tried" in error
    assert not scored(str(folder))
    failing[:] = ["ba8-"]
    assert main(words) == 1
    assert "failed: ba8; the same command tries again" in capsys.readouterr().out
    failing.clear()
    assert main(words) == 0
    assert scored(str(folder)) == [4, 8, 12] and capsys.readouterr().out.count("fine-tuning on") == 1
    assert main([*words, "optimizer.lr=1e-4"]) == 2
    assert "give these scores another name, run_name=…" in capsys.readouterr().err
    assert main([*words, "optimizer.lr=1e-4", "run_name=lower-rate", "--every", "10ba"]) == 0
    assert (folder / "scores" / "lower-rate" / "ba12.json").is_file() and len(scored(str(folder))) == 4


def test_wrong_arguments(tmp_path: Path, task: FinetuneConfig, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_task(task, tmp_path))
    assert main(["watch", str(tmp_path / "missing"), "--task", file]) == 2
    assert "to watch a run before its start, give its YAML" in capsys.readouterr().err
    for every in ("0ba", "5tok", "many"):
        assert main(["watch", str(tmp_path), "--task", file, "--every", every]) == 2
        assert "argument --every: expected a number of at least 1" in capsys.readouterr().err


def test_an_unreachable_bucket_is_waited_for(
    tmp_path: Path, write_yaml: Write, task: FinetuneConfig, s3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "buckets" / "watched").mkdir(parents=True)
    server, port = serve_s3(tmp_path / "buckets")
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    place = "s3://watched/run"
    try:
        train(config_of(write_yaml("away", checkpoint__interval="6ba", checkpoint__folder=place, **PLAIN)))
        server.terminate()
        server.wait(10)
        watcher = start_watch(place, write_task(task, tmp_path))
        wait_for(lambda: "trying again every 0.1 s" in watcher._read("out"))
        time.sleep(0.5)
        assert watcher.poll() is None
        server, _ = serve_s3(tmp_path / "buckets", port)
        ended = watcher.wait()
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("can't be read and written") == 1 and scored(place) == [6, 12]
    finally:
        server.terminate()
        server.wait(10)


def test_a_trial_yields_to_the_run_and_dies_with_its_parent(
    tmp_path: Path, task: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "trial.py", tmp_path / "out.json"
    script.write_text(
        "import json, os, sys, time\nfrom pathlib import Path\n"
        f"facts = [os.nice(0), os.environ.get('CUDA_VISIBLE_DEVICES'), os.getpid()]\n"
        f"Path({str(out)!r} + '.part').write_text(json.dumps(facts))\nos.rename({str(out)!r} + '.part', {str(out)!r})\n"
        "time.sleep(float(Path(sys.argv[1]).read_text()))\nsys.exit(3)\n"
    )
    monkeypatch.setattr(watch, "_TRIAL", (sys.executable, str(script)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file, watcher = tmp_path / "trial.yaml", Watcher(str(tmp_path), task)
    file.write_text("0")
    here, elsewhere = {"process": process_id(os.getpid())}, {"process": ["another machine"]}
    assert watcher._run_trial(file, [elsewhere, here]) == 3
    assert json.loads(out.read_text())[:2] == [19, ""]
    for attempts in ([], [elsewhere], [{**here, "until": "now"}]):
        watcher._run_trial(file, attempts)
        assert json.loads(out.read_text())[:2] == [19, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    watcher._run_trial(file, [here])
    assert json.loads(out.read_text())[:2] == [19, "1"]
    # A killed or interrupted watcher leaves no trial behind.
    file.write_text("100")
    for number in (signal.SIGKILL, signal.SIGINT):
        out.unlink()
        if not (pid := os.fork()):
            try:
                watcher._run_trial(file, [])
            finally:
                os._exit(0)
        trial = wait_for(lambda: out.exists() and json.loads(out.read_text())[2])
        os.kill(pid, number)
        os.waitpid(pid, 0)
        wait_for(lambda trial=trial: has_ended(trial), 10)


def has_ended(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # between two looks at it
        return True


def test_an_installed_package_starts_trials_without_the_clone(
    tmp_path: Path, task: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(watch.__file__).parent, tmp_path / "site" / "biphasic")
    file = tmp_path / "trial.yaml"
    file.write_text(f"{dump(task)}\nunknown: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(watch, "NICENESS", 0)
    status = Watcher(str(tmp_path), task)._run_trial(file, [])
    log = (tmp_path / "trial.log").read_text()
    assert status == 2 and "trial.yaml" in log and "unknown" in log, log


def test_scores_in_the_loggers(
    write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    keep_local(tmp_path, monkeypatch)
    config = config_of(write_yaml("logged", logging__wandb="project", logging__mlflow="experiment"))
    for batch in (10, 20):
        log_scores(config, "sst2", batch, {KEY: batch / 100})
    assert "can't be logged" not in capsys.readouterr().out
    [run] = mlflow.search_runs(experiment_names=["experiment"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, KEY)
    assert run.info.run_name == "logged-sst2" and [(each.step, each.value) for each in history] == [
        (10, 0.1),
        (20, 0.2),
    ]
    assert len(list(tmp_path.glob("wandb/offline-run-*-logged-sst2"))) in (1, 2)
    # A logger that can't be used doesn't end the command.
    mlflow.set_tracking_uri("sqlite:////nowhere")  # not a store of the client alone
    log_scores(config, "sst2", 30, {KEY: 0.3})
    assert "ba30: its scores can't be logged (" in capsys.readouterr().out
