"""Runs that save to a bucket: their checkpoints are complete, whatever happens to the bucket or the machine."""

import errno
import json
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.checkpointing import save
from biphasic.checkpointing.manifest import Manifest, batch_of, list_checkpoints
from biphasic.checkpointing.run_lock import RunLock, read_attempts
from biphasic.checkpointing.save import Saver
from biphasic.checkpointing.upload import Uploader
from biphasic.errors import Unavailable, UserError
from biphasic.storage import S3Store, open_store
from biphasic.training.metrics_file import read_metrics
from biphasic.training.recipe import run_settings
from conftest import Write
from helpers.buckets import bucket_for, flip_a_bit
from helpers.tiny import add_callback, config_of, keep_checkpoints_up_to, launch, losses, train, weights, write_rows


def complete(place: str) -> list[int]:
    return [checkpoint.batch for checkpoint in list_checkpoints(open_store(place)) if checkpoint.manifest is not None]


def test_a_run_resumes_from_a_bucket_alone(s3: Path, write_yaml: Write) -> None:
    """The machine's disk is lost."""
    place = f"s3://{bucket_for(s3, 'saver-one')}/runs/one"
    uninterrupted = train(config_of(write_yaml("uninterrupted")))
    path = write_yaml("lost", checkpoint__folder=place, checkpoint__interval="2ba", checkpoint__keep=3)
    folder = train(config_of(path))
    assert losses(folder) == losses(uninterrupted)
    # Three, and the one at the switch.
    assert complete(place) == [12, 10, 8, 6]
    assert sorted(name for name in open_store(place).list() if name.endswith(".pt")) == [
        "ba10-rank0.pt", "ba12-rank0.pt", "ba6-rank0.pt", "ba8-rank0.pt"]  # fmt: skip
    # The local folder keeps only the newest.
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["ba12-rank0.pt"]
    manifest = json.loads(open_store(place).read("ba12.json"))
    assert manifest["run"]["name"] == "lost" and manifest["run"]["ranks"] == 1
    assert 0 < manifest["run"]["tokens"] < 12 * 8 * 32

    shutil.rmtree(folder)
    open_store(place).remove(["ba12.json"])
    again = train(config_of(path))
    assert losses(again) == losses(uninterrupted)[10:]
    assert complete(place) == [12, 10, 8, 6]
    expected = weights(uninterrupted, 12)
    assert all((weight == expected[name]).all() for name, weight in weights(again, 12).items())


@pytest.mark.slow  # tests/faults/test_kills.py saves with two ranks to a bucket, too
def test_two_ranks_save_to_a_bucket(s3: Path, write_yaml: Write) -> None:
    place = f"s3://{bucket_for(s3, 'saver-two')}/two"
    keys: dict[str, Any] = {"parallelism__strategy": "fsdp", "checkpoint__folder": place, "checkpoint__interval": "4ba"}
    path = write_yaml("two", **keys)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    folder = Path(config_of(path).output) / "two"
    expected = losses(folder)
    assert complete(place) == [12, 8, 6, 4]
    names = list(open_store(place).list("ep0-ba8"))
    assert names == ["ep0-ba8/.metadata", "ep0-ba8/__0_0.distcp", "ep0-ba8/__1_0.distcp"]
    assert not [name for name in open_store(place).list() if ".rank" in name]
    shutil.rmtree(folder)
    # One rank's file of the newest checkpoint is missing.
    open_store(place).remove(["ep0-ba12/__1_0.distcp"])
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "checkpoint ba12 in" in run.stderr + run.stdout
    assert losses(folder) == expected[8:]
    # No attempt has left an incomplete checkpoint.
    assert not [name for name in open_store(place).list() if ".rank" in name or name == "lock.json"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["ep0-ba12"]


class UnavailableBucket:
    """Lets the next uploads fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int):
        self.failures = failures
        put = S3Store.upload

        def refuse(place: S3Store, file: Path, name: str) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError("503 SlowDown")
            put(place, file, name)

        monkeypatch.setattr(S3Store, "upload", refuse)


def test_pending_checkpoints_are_uploaded_by_the_next_start(
    s3: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"s3://{bucket_for(s3, 'saver-gone')}/gone"
    bucket = UnavailableBucket(monkeypatch, 1000)
    path = write_yaml("gone", checkpoint__folder=place, checkpoint__interval="6ba")
    monkeypatch.setattr(save, "UPLOAD_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(
        Unavailable, match=r"can't be written; not yet uploaded: ba6-rank0.pt, ba8-rank0.pt, ba12-rank0.pt \(in "
    ):
        train(config_of(path))
    folder = Path(config_of(path).output) / "gone" / "checkpoints"
    assert {"ba12-rank0.pt", "ba6-rank0.pt", "ba12.rank0.json"} <= {path.name for path in folder.iterdir()}
    assert complete(place) == []
    # The next start uploads them, and has nothing to train.
    bucket.failures = 0
    train(config_of(path))
    assert complete(place) == [12, 8, 6]
    assert (folder.parent / "metrics.jsonl").read_text().count("loss/train/total") == 12


def test_all_ranks_wait_for_the_last_upload(write_yaml: Write) -> None:
    """Longer than training's process group waits."""
    code = """
import time
from helpers import tiny
from datetime import timedelta
from composer.core import Callback
from torch.distributed import group
from biphasic.checkpointing.upload import Uploader
upload = Uploader._upload
def slow(self, part):
    time.sleep(12 if part.manifest.batch == 12 else 0)
    return upload(self, part)
Uploader._upload = slow
class Impatient(Callback):
    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == 12:
            group.WORLD.set_timeout(timedelta(seconds=4))
tiny.add_callback(Impatient())
"""
    path = write_yaml("waiting")
    run = launch(path, processes=2, code=code)
    assert run.returncode == 0, run.stderr[-3000:]
    assert complete(str(config_of(path).local_checkpoints))[0] == 12


def test_a_disk_that_is_full_stops_the_run(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest complete checkpoint stays usable."""
    write = Saver._write_monolithic

    def fill_disk(saver: Saver, content: dict[str, Any], path: Path) -> list[Path]:
        if batch_of(path.name) not in (1, 2, 3, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(saver, content, path)

    uninterrupted = train(config_of(write_yaml("uninterrupted")))
    path = write_yaml("full")
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_write_monolithic", fill_disk)
        with pytest.raises(
            UserError, match=r"^checkpoint ba\d+-rank0.pt can't be written to .* \(No space left on device\)"
        ):
            train(config_of(path))
    folder = uninterrupted.parent / "full"
    assert complete(str(folder / "checkpoints")) == [4, 3, 2, 1]
    train(config_of(path))
    assert losses(folder) == losses(uninterrupted)


def test_a_preempted_run_whose_disk_is_full_does_not_say_that_it_saved(
    write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signal(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    def fill_disk(saver: Saver, content: dict[str, Any], path: Path) -> list[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add_callback(Signal(), monkeypatch.setattr)
    monkeypatch.setattr(Saver, "_write_monolithic", fill_disk)
    path = write_yaml("preempted", checkpoint__interval="1000ba")
    with pytest.raises(UserError, match=r"^SIGTERM: not saved: checkpoint ba5-rank0.pt can't be written .* \(No space"):
        train(config_of(path))
    [attempt] = read_attempts(open_store(str(config_of(path).local_checkpoints)))
    assert attempt["reason"].startswith("SIGTERM: not saved: ")


def test_a_missing_bucket_is_refused(s3: Path) -> None:
    message = r"^checkpoint.folder s3://no-such-bucket-here/x: can't be read and written \("
    with pytest.raises(UserError, match=message) as refused:
        RunLock("s3://no-such-bucket-here/x").acquire(1)
    assert not isinstance(refused.value, Unavailable)


def test_the_newest_and_the_branch_points_are_kept(write_yaml: Write) -> None:
    folder = train(config_of(write_yaml("few", checkpoint__keep=2, checkpoint__keep_at=["3ba"])))
    # Branch points: `keep_at`, the switch, the start of the decay.
    kept = [f"ba{batch}{end}" for batch in (3, 6, 8, 11, 12) for end in ("-rank0.pt", ".json")]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted([*kept, "attempts"])


def test_branch_points_between_two_intervals(write_yaml: Write) -> None:
    folder = train(config_of(write_yaml("between", checkpoint__interval="5ba", checkpoint__keep_at=["0.25dur", "1500tok"])))
    tokens = [entry["tokens"] for entry in read_metrics(folder / "metrics.jsonl")]
    crossing = next(index for index, count in enumerate(tokens) if count >= 1500) + 1
    assert complete(str(folder / "checkpoints")) == sorted({3, 5, 6, 8, 10, 12, crossing}, reverse=True)


def yaml_of_four_epochs(write_yaml: Write, **keys: Any) -> Path:
    """Three batches each."""
    path = write_yaml("epochs", max_duration="4ep", schedule={"warmup": "3ba"}, **keys)
    shutil.rmtree(path.parent / "data" / "train")
    write_rows(path.parent / "data" / "train", 40, seed=1)
    return path


@pytest.mark.parametrize("interval", ["0.25dur", "3ba"])
def test_branch_points_at_the_end_of_an_epoch(write_yaml: Write, capsys: pytest.CaptureFixture[str], interval: str) -> None:
    path = yaml_of_four_epochs(write_yaml, checkpoint={"interval": interval, "keep": 1, "keep_at": ["3ep"]})
    folder = train(config_of(path))
    assert complete(str(folder / "checkpoints")) == [12, 9, 6]
    newest = list_checkpoints(open_store(str(folder / "checkpoints")))[0].manifest
    assert newest is not None and newest.progress.reached(config_of(path).max_duration)
    train(config_of(path))
    assert "already trained to 4ep" in capsys.readouterr().out
    # The same as without the interruption.
    expected = losses(folder)
    keep_checkpoints_up_to(folder, 9)
    train(config_of(path))
    assert losses(folder) == expected


def test_a_branch_point_at_the_end_of_a_shortened_epoch(write_yaml: Write) -> None:
    """With `data.start_at` the first epoch has two batches instead of three."""
    path = yaml_of_four_epochs(write_yaml, checkpoint={"keep": 1, "keep_at": ["1ep"], "interval": "1ba"},
                               data__start_at="1ba")  # fmt: skip
    assert complete(str(train(config_of(path)) / "checkpoints")) == [11, 6, 2]  # the switch is at 6


def test_a_checkpoint_after_an_epoch_continues_with_the_next_one(write_yaml: Write) -> None:
    path = yaml_of_four_epochs(write_yaml, checkpoint__interval="1ep")
    folder = train(config_of(path))
    expected = losses(folder)
    keep_checkpoints_up_to(folder, 3)
    train(config_of(path))
    assert losses(folder) == expected


def test_a_branch_starts_from_a_bucket(s3: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "saver-trunk")
    keys: dict[str, Any] = {"max_duration": "12ba", "objective__phases": [{"name": "clm"}]}
    trunk: dict[str, Any] = {**keys, "schedule": {"warmup": "3ba"}, "checkpoint__folder": f"s3://{bucket}/trunk"}
    train(config_of(write_yaml("trunk", **trunk, checkpoint__keep=1, checkpoint__keep_at=["8ba"])))
    assert complete(f"s3://{bucket}/trunk") == [12, 8]
    decay = {"warmup": "3ba", "decay": "4ba"}
    uninterrupted = train(config_of(write_yaml("uninterrupted", **keys, schedule=decay)))
    place = f"s3://{bucket}/trunk"
    branch = train(config_of(write_yaml("branch", **keys, schedule=decay, start_from=place)))
    assert losses(branch) == losses(uninterrupted)[8:]
    assert read_attempts(open_store(str(branch / "checkpoints")))[0]["from"]["batch"] == 8
    flip_a_bit(bucket, "trunk/ba8-rank0.pt")
    with pytest.raises(UserError, match=r"^checkpoint s3://.*: can't be used \(ba8-rank0.pt is damaged"):
        train(config_of(write_yaml("other", **keys, schedule=decay, start_from=place)))
    with pytest.raises(UserError, match=r"^start_from: s3://.*: there is no ba9.json"):
        train(config_of(write_yaml("none", **keys, schedule=decay, start_from=f"{place}/ba9-rank0.pt")))


@pytest.mark.parametrize(
    ("rank", "local", "deleted"),
    [(0, 0, {"__0_0.distcp", ".metadata", "__4_0.distcp", "__7_1.distcp"}), (1, 1, {"__1_0.distcp"}),
     (4, 0, {"__0_0.distcp", "__1_0.distcp", ".metadata", "__4_0.distcp", "__7_1.distcp"})],
)  # fmt: skip
def test_local_copies_of_uploaded_checkpoints_are_deleted(tmp_path: Path, rank: int, local: int, deleted: set[str]) -> None:
    """Machines of two ranks; eight ranks saved. Each deletes its own files, the first one other machines' too."""

    files = {"__0_0.distcp", "__1_0.distcp", "__4_0.distcp", "__7_1.distcp", ".metadata"}
    for name in ("ep0-ba3", "ep0-ba5-validating", "ep0-ba5"):
        folder = tmp_path / name
        folder.mkdir()
        for name in files:
            (folder / name).write_text("x")
    uploader = Uploader(tmp_path, "s3://elsewhere/run", 1, rank, range(rank - local, rank - local + 2), 5)
    uploader._delete_local_copies(Manifest(5, "ep0-ba5", {}, {}))
    uploader.close()
    for old in ("ep0-ba3", "ep0-ba5-validating"):
        remaining = {path.name for path in (tmp_path / old).iterdir()} if (tmp_path / old).exists() else set()
        assert files - remaining == deleted
    assert {path.name for path in (tmp_path / "ep0-ba5").iterdir()} == files


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    none: Any = SimpleNamespace()
    saver = Saver(run_settings(config_of(write_yaml())), none, none, None, {})
    synced, sync, content = dict[int, int](), os.fsync, {"weights": torch.ones(1 << 12)}

    def record(number: int) -> None:
        sync(number)
        synced[os.fstat(number).st_ino] = os.fstat(number).st_size

    monkeypatch.setattr(os, "fsync", record)
    write = saver._write_sharded if sharded else saver._write_monolithic
    written = [path.stat() for path in write(content, tmp_path / "ba1")]
    assert len(written) == 1 + sharded
    assert {each.st_ino: each.st_size for each in written} == synced


def test_the_writer_uses_its_rank_s_gpu(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current GPU is 0."""
    none: Any = SimpleNamespace()
    config = config_of(write_yaml())
    used: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, current_thread().name)))
    Saver(run_settings(config), none, none, None, {})._writer.submit(int).result()
    assert used == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    Saver(run_settings(config), none, none, None, {})._writer.submit(int).result()
    assert used == [(3, "checkpoint-writer_0")]
