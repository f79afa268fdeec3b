"""Runs that save to a bucket: complete checkpoints, whatever happens to the bucket or the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.manifest import checkpoints_in
from biphasic.config.errors import UserError
from biphasic.storage import S3Store, store
from biphasic.training.jsonl_logger import read_metrics
from buckets import bucket_for, flip_a_bit
from conftest import Write
from tiny import config_of, keep_checkpoints_up_to, launch, losses, train, weights


def complete(place: str) -> list[int]:
    return [found.batch for found in checkpoints_in(store(place)) if found.manifest is not None]


def test_a_run_goes_on_from_a_bucket_alone(s3: Path, write_yaml: Write) -> None:
    """The first machine is lost with all that it had."""
    place = f"s3://{bucket_for(s3, 'saver-one')}/runs/one"
    whole = train(config_of(write_yaml("whole")))
    path = write_yaml("lost", checkpoint__folder=place, checkpoint__interval="2ba", checkpoint__keep=3)
    folder = train(config_of(path))
    assert losses(folder) == losses(whole)
    # Three, and the one at the switch.
    assert complete(place) == [12, 10, 8, 6]
    assert sorted(name for name in store(place).list() if name.endswith(".pt")) == [
        "ba10-rank0.pt", "ba12-rank0.pt", "ba6-rank0.pt", "ba8-rank0.pt"]  # fmt: skip
    # In a bucket's case this machine keeps the newest.
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["ba12-rank0.pt"]
    manifest = json.loads(store(place).read("ba12.json"))
    assert manifest["run"]["name"] == "lost" and manifest["run"]["ranks"] == 1
    assert 0 < manifest["run"]["tokens"] < 12 * 8 * 32

    shutil.rmtree(folder)
    store(place).remove(["ba12.json"])
    again = train(config_of(path))
    assert losses(again) == losses(whole)[10:]
    assert complete(place) == [12, 10, 8, 6]
    ours, theirs = weights(again, 12), weights(whole, 12)
    assert all((weight == theirs[name]).all() for name, weight in ours.items())


def test_two_ranks_in_a_bucket(s3: Path, write_yaml: Write) -> None:
    place = f"s3://{bucket_for(s3, 'saver-two')}/two"
    keys: dict[str, Any] = {"parallelism__strategy": "fsdp", "checkpoint__folder": place, "checkpoint__interval": "4ba"}
    path = write_yaml("two", **keys)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    folder = Path(config_of(path).output) / "two"
    expected = losses(folder)
    assert complete(place) == [12, 8, 6, 4]
    names = list(store(place).list("ep0-ba8"))
    assert names == ["ep0-ba8/.metadata", "ep0-ba8/__0_0.distcp", "ep0-ba8/__1_0.distcp"]
    assert not [name for name in store(place).list() if ".rank" in name]
    shutil.rmtree(folder)
    # One rank's file of the newest is gone.
    store(place).remove(["ep0-ba12/__1_0.distcp"])
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "checkpoint ba12 in" in run.stderr + run.stdout
    assert losses(folder) == expected[8:]
    # Neither rank's attempts left anything half done, there or here.
    assert not [name for name in store(place).list() if ".rank" in name or name == "claim.json"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["ep0-ba12"]


class Away:
    """A bucket that can't be written to for the next calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int):
        self.left = calls
        put = S3Store.put

        def refuse(place: S3Store, file: Path, name: str) -> None:
            if self.left:
                self.left -= 1
                raise OSError("503 SlowDown")
            put(place, file, name)

        monkeypatch.setattr(S3Store, "put", refuse)


def test_a_bucket_that_is_away_for_a_while(
    s3: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"s3://{bucket_for(s3, 'saver-away')}/away"
    Away(monkeypatch, 3)
    folder = train(config_of(write_yaml("away", checkpoint__folder=place, checkpoint__interval="2ba")))
    assert len(losses(folder)) == 12
    # It caught up: those that had to wait are there too.
    assert complete(place) == [12, 10, 8, 6, 4, 2]
    assert caplog.text.count("can't be stored in") == 1
    assert "503 SlowDown" in caplog.text
    assert "ba2-rank0.pt is stored in" in caplog.text


def test_a_bucket_that_stays_away(s3: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"s3://{bucket_for(s3, 'saver-gone')}/gone"
    away = Away(monkeypatch, 1000)
    path = write_yaml("gone", checkpoint__folder=place, checkpoint__interval="6ba", checkpoint__patience=1)
    with pytest.raises(UserError, match=r"can't be written \(ba6-rank0.pt, ba8-rank0.pt, ba12-rank0.pt stayed in "):
        train(config_of(path))
    folder = Path(config_of(path).output) / "gone" / "checkpoints"
    assert {"ba12-rank0.pt", "ba6-rank0.pt", "ba12.rank0.json"} <= {path.name for path in folder.iterdir()}
    assert complete(place) == []
    # Started again when the bucket is back, it stores what waited, and has nothing left to train.
    away.left = 0
    train(config_of(path))
    assert complete(place) == [12, 8, 6]
    assert (folder.parent / "metrics.jsonl").read_text().count("loss/train/total") == 12


def test_a_disk_limit_while_the_bucket_is_away(s3: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"s3://{bucket_for(s3, 'saver-full')}/full"
    away = Away(monkeypatch, 1000)
    keys: dict[str, Any] = {"checkpoint__interval": "1ba", "checkpoint__disk_limit": "1mb"}
    path = write_yaml("full", checkpoint__folder=place, **keys)
    with pytest.raises(UserError, match=r"^checkpoint.disk_limit: .* wait for s3://.* and another one would not fit"):
        train(config_of(path))
    folder = Path(config_of(path).output) / "full"
    done = len(losses(folder))
    assert 1 < done < 12
    away.left = 0
    train(config_of(path))
    assert complete(place) == list(range(12, 0, -1))
    assert len(losses(folder)) == 12


def test_a_bucket_that_is_not_there(s3: Path, write_yaml: Write) -> None:
    with pytest.raises(UserError, match=r"^checkpoint.folder s3://no-such-bucket-here/x: can't be read and written \("):
        train(config_of(write_yaml("none", checkpoint__folder="s3://no-such-bucket-here/x")))


def test_only_the_newest_stay(write_yaml: Write) -> None:
    folder = train(config_of(write_yaml("few", checkpoint__keep=2, checkpoint__keep_at=["3ba"])))
    # And those that others may branch off: as asked, at the switch, where the decay begins.
    kept = [f"ba{batch}{end}" for batch in (3, 6, 8, 11, 12) for end in ("-rank0.pt", ".json")]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted([*kept, "attempts"])


def test_a_moment_between_two_intervals(write_yaml: Write) -> None:
    folder = train(
        config_of(write_yaml("between", checkpoint__interval="5ba", checkpoint__keep_at=["0.25dur", "1500tok"]))
    )
    tokens = [entry["tokens"] for entry in read_metrics(folder / "metrics.jsonl")]
    crossing = next(index for index, count in enumerate(tokens) if count >= 1500) + 1
    assert complete(str(folder / "checkpoints")) == sorted({3, 5, 6, 8, 10, 12, crossing}, reverse=True)


def test_a_manifest_of_another_run(write_yaml: Write, caplog: pytest.LogCaptureFixture) -> None:
    other = train(config_of(write_yaml("other", optimizer__lr=1e-3)))
    expected = losses(train(config_of(write_yaml("whole"))))
    path = write_yaml("mine")
    folder = Path(config_of(path).output) / "mine"
    train(config_of(path, **{"checkpoint.interval": "4ba"}))
    keep_checkpoints_up_to(folder, 8)
    for name in ("ba11.json", "ba11-rank0.pt"):
        shutil.copy(other / "checkpoints" / name, folder / "checkpoints" / name)
    train(config_of(path))
    assert "checkpoint ba11 in" in caplog.text and "it is of another run, other" in caplog.text
    assert losses(folder) == expected
    # Nothing but another run's: nothing is written over.
    with pytest.raises(UserError, match=r"holds the checkpoints of another run, other: choose another folder"):
        train(config_of(write_yaml("third", checkpoint__folder=str(other / "checkpoints"))))
    assert len(losses(other)) == 12


def test_a_pointer_to_nothing(write_yaml: Write) -> None:
    """Composer's link to the newest checkpoint is not looked at."""
    path = write_yaml("linked", max_duration="12ba")
    expected = losses(train(config_of(path)))
    folder = Path(config_of(path).output) / "linked"
    keep_checkpoints_up_to(folder, 7)
    (folder / "checkpoints" / "latest-rank0.pt").symlink_to("ba99-rank0.pt")
    train(config_of(path))
    assert losses(folder) == expected


def test_a_branch_of_a_trunk_in_a_bucket(s3: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "saver-trunk")
    keys: dict[str, Any] = {"max_duration": "12ba", "objective__phases": [{"name": "clm"}]}
    trunk: dict[str, Any] = {**keys, "schedule": {"warmup": "3ba"}, "checkpoint__folder": f"s3://{bucket}/trunk"}
    train(config_of(write_yaml("trunk", **trunk, checkpoint__keep=1, checkpoint__keep_at=["8ba"])))
    assert complete(f"s3://{bucket}/trunk") == [12, 8]
    decay = {"warmup": "3ba", "decay": "4ba"}
    whole = train(config_of(write_yaml("whole", **keys, schedule=decay)))
    place = f"s3://{bucket}/trunk/ba8-rank0.pt"
    branch = train(config_of(write_yaml("branch", **keys, schedule={**decay, "decay_from": place})))
    assert losses(branch) == losses(whole)[8:]
    flip_a_bit(bucket, "trunk/ba8-rank0.pt")
    with pytest.raises(UserError, match=r"^checkpoint s3://.*: can't be used \(ba8-rank0.pt is damaged"):
        train(config_of(write_yaml("other", **keys, schedule={**decay, "decay_from": place})))
    with pytest.raises(UserError, match=r"its manifest is ba9.json"):
        train(config_of(write_yaml("none", **keys, schedule={**decay, "decay_from": place.replace("ba8", "ba9")})))


@pytest.mark.parametrize(
    ("rank", "local", "gone"),
    [(0, 0, {"__0_0.distcp", ".metadata", "__4_0.distcp", "__7_1.distcp"}), (1, 1, {"__1_0.distcp"}),
     (4, 0, {"__0_0.distcp", "__1_0.distcp", ".metadata", "__4_0.distcp", "__7_1.distcp"})],
)  # fmt: skip
def test_a_machine_keeps_nothing_that_a_start_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, local: int, gone: set[str]
) -> None:
    """Machines of two ranks; the checkpoint was of eight. Each rank clears its own, the first what is nobody's here."""
    from biphasic.checkpointing import uploads

    files = {"__0_0.distcp", "__1_0.distcp", "__4_0.distcp", "__7_1.distcp", ".metadata"}
    for batch in (3, 5):
        folder = tmp_path / f"ep0-ba{batch}"
        folder.mkdir()
        for name in files:
            (folder / name).write_text("x")
    for name, value in {"get_global_rank": rank, "get_local_rank": local, "get_local_world_size": 2}.items():
        monkeypatch.setattr(uploads.dist, name, lambda value=value: value)
    ours = uploads.Uploads(tmp_path, "s3://elsewhere/run", 1, None)
    ours._clear_here(5)
    left = {path.name for path in (tmp_path / "ep0-ba3").iterdir()} if (tmp_path / "ep0-ba3").exists() else set()
    assert files - left == gone
    assert {path.name for path in (tmp_path / "ep0-ba5").iterdir()} == files
