"""Which checkpoints are complete, and how outdated and damaged ones are handled."""

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from biphasic.checkpointing.manifest import (
    Known,
    Manifest,
    batch_of,
    list_checkpoints,
    manifest_batches,
    newest_complete,
    outdated_checkpoints,
    rank_manifest_name,
    rank_of,
    read_manifest,
)
from biphasic.checkpointing.upload import Uploader
from biphasic.durations import Duration
from biphasic.storage import Store, file_hash, open_store
from helpers.buckets import bucket_for, flip_a_bit


def write_checkpoint(folder: Path, batch: int, *, sharded: bool = False) -> Manifest:
    """A complete checkpoint."""
    names = [f"ep0-ba{batch}/.metadata", f"ep0-ba{batch}/__0_0.distcp"] if sharded else [f"ba{batch}-rank0.pt"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{name} ".encode() * 100)
    files = {name: ((folder / name).stat().st_size, file_hash(folder / name)) for name in names}
    manifest = Manifest(
        batch, f"ep0-ba{batch}" if sharded else names[0], files, {"name": "run", "tokens": batch, "writers": 1}
    )
    (folder / manifest.name).write_bytes(manifest.to_bytes())
    return manifest


def newest_path(place: Store, folder: Path) -> Path | None:
    manifest = newest_complete(place, folder)
    return None if manifest is None else folder / manifest.path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "not finished": (lambda f: (f / "ba9.json").unlink(), "it has no ba9.json, so it was not finished"),
    "cut off": (lambda f: truncate(f / "ba9-rank0.pt"), "ba9-rank0.pt has 1,291 bytes instead of 1,300"),
    "damaged": (lambda f: flip_bit(f / "ba9-rank0.pt"), "ba9-rank0.pt is damaged: its hash is not the manifest's"),
    "missing": (lambda f: (f / "ba9-rank0.pt").unlink(), "ba9-rank0.pt is missing"),
    "no manifest": (
        lambda f: (f / "ba9.json").write_text("{}"),
        "ba9.json is not a manifest",
    ),
    "no JSON": (lambda f: truncate(f / "ba9.json"), "ba9.json is not a manifest"),
    "another's": (lambda f: (f / "ba9.json").write_bytes((f / "ba8.json").read_bytes()), "the manifest of batch 8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_checkpoint_is_skipped(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    for batch in (7, 8, 9):
        write_checkpoint(tmp_path, batch)
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ba9-rank0.pt"
    assert not caplog.records
    make, reason = FAULTS[fault]
    make(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ba8-rank0.pt"
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"checkpoint ba9 in {tmp_path} is skipped: ")
    assert reason in message


def test_sharded_checkpoints_are_folders(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 20, sharded=True)
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ep0-ba20"
    (tmp_path / "ep0-ba30").mkdir()
    (tmp_path / "ep0-ba30" / "__0_0.distcp").touch()
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ep0-ba20"
    (tmp_path / "ep0-ba20" / ".metadata").unlink()
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ba10-rank0.pt"


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert newest_path(open_store(str(tmp_path / "none")), tmp_path / "none") is None
    (tmp_path / "latest-rank0.pt").touch()
    (tmp_path / "notes.txt").touch()
    assert list_checkpoints(open_store(str(tmp_path))) == []


def upload_folder(s3: Path, name: str, folder: Path) -> tuple[Store, str]:
    bucket = bucket_for(s3, name)
    place = open_store(f"s3://{bucket}/run")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            place.upload(path, path.relative_to(folder).as_posix())
    return place, bucket


def test_checkpoints_are_downloaded_and_verified(s3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, here = tmp_path / "made", tmp_path / "here"
    for batch in (1, 2, 3):
        write_checkpoint(made, batch, sharded=True)
    place, bucket = upload_folder(s3, "manifests", made)
    assert newest_path(place, here) == here / "ep0-ba3"
    assert (here / "ep0-ba3" / "__0_0.distcp").read_bytes() == (made / "ep0-ba3" / "__0_0.distcp").read_bytes()
    # What is here already and right isn't fetched again; what isn't right is.
    before = (here / "ep0-ba3" / ".metadata").stat().st_mtime_ns
    flip_bit(here / "ep0-ba3" / "__0_0.distcp")
    assert newest_path(place, here) == here / "ep0-ba3"
    assert (here / "ep0-ba3" / ".metadata").stat().st_mtime_ns == before
    assert (here / "ep0-ba3" / "__0_0.distcp").read_bytes() == (made / "ep0-ba3" / "__0_0.distcp").read_bytes()
    # Damaged in the bucket: the previous one, and nothing damaged stays here.
    flip_a_bit(bucket, "run/ep0-ba3/__0_0.distcp")
    (here / "ep0-ba3" / "__0_0.distcp").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_path(place, here) == here / "ep0-ba2"
    assert "checkpoint ba3 in s3://" in caplog.text and "__0_0.distcp is damaged" in caplog.text
    assert not (here / "ep0-ba3" / "__0_0.distcp").exists()


def uploader_of(folder: Path, keep: int) -> Uploader:
    uploader = Uploader(folder, str(folder), keep)
    uploader.close()
    return uploader


def test_outdated_checkpoints_lose_their_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, newest, _ = (write_checkpoint(tmp_path, batch, sharded=True) for batch in (1, 2, 3, 4))
    (tmp_path / "ba4.json").unlink()
    place = open_store(str(tmp_path))
    assert outdated_checkpoints(place, place.list(), 2, {}) == {1}
    assert outdated_checkpoints(place, place.list(), -1, {}) == set()
    uploader_of(tmp_path, keep=2)._delete_old(place, newest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ba2.json", "ba3.json", "ep0-ba2", "ep0-ba3", "ep0-ba4"]
    removed: list[str] = []
    monkeypatch.setattr(type(place), "remove", lambda self, names: removed.extend(names))
    uploader_of(tmp_path, keep=1)._delete_old(place, newest)
    assert removed == ["ba2.json", "ba2.json", "ep0-ba2/.metadata", "ep0-ba2/__0_0.distcp"]


def test_composer_s_latest_pointer_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 7)
    (tmp_path / "latest-rank0.pt").symlink_to("ba99-rank0.pt")
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ba7-rank0.pt"


def test_kept_checkpoints_are_never_outdated(tmp_path: Path) -> None:
    for batch in (1, 2, 3):
        manifest = write_checkpoint(tmp_path, batch)
        if batch == 2:
            (tmp_path / manifest.name).write_bytes(replace(manifest, run={**manifest.run, "kept": True}).to_bytes())
    place = open_store(str(tmp_path))
    assert outdated_checkpoints(place, place.list(), 1, {}) == {1}


def test_a_checkpoint_at_a_later_branch_point_is_kept(tmp_path: Path) -> None:
    """Such as the start of a decay with which a run without one goes on."""
    for batch in (1, 2, 3, 4):
        manifest = write_checkpoint(tmp_path, batch)
        last = {"rows": 0, "tokens": 0, "epochs": 0, "last_batch": [batch - 1, 0, 0, 0]}
        (tmp_path / manifest.name).write_bytes(replace(manifest, run={**manifest.run, **last}).to_bytes())
    place = open_store(str(tmp_path))
    assert outdated_checkpoints(place, place.list(), 1, {}, [Duration(2, "ba")]) == {1, 3}


def test_a_manifest_is_read_once_for_each_of_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (1, 2, 3):
        manifest = write_checkpoint(tmp_path, batch)
    place, known, read = open_store(str(tmp_path)), Known(), list[str]()
    real = type(place).read
    monkeypatch.setattr(type(place), "read", lambda self, name: read.append(name) or real(self, name))
    assert [found.batch for found in list_checkpoints(place, place.list(), known) if found.manifest] == [3, 2, 1]
    assert sorted(read) == ["ba1.json", "ba2.json", "ba3.json"]
    read.clear()
    (tmp_path / "ba1.json").unlink()
    (tmp_path / "ba2-rank0.pt").write_text("another size")
    (tmp_path / "ba3.json").write_bytes(replace(manifest, run={**manifest.run, "kept": True}).to_bytes())
    third, second, first = list_checkpoints(place, place.list(), known)
    assert third.manifest is not None and third.manifest.run["kept"]
    assert second.manifest is None and second.fault is not None and "instead of" in second.fault
    assert first.fault == "it has no ba1.json, so it was not finished"
    assert read == ["ba3.json"] and sorted(name for name, _ in known) == ["ba2.json", "ba3.json"]
    assert outdated_checkpoints(place, place.list(), 1, known) == set() and read == ["ba3.json"]


def test_a_checkpoint_that_cannot_be_read_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt may read it, so no older one takes its place."""
    made, here = tmp_path / "made", tmp_path / "here"
    for batch in (8, 9):
        write_checkpoint(made, batch)
    place = open_store(str(made))

    def fail(self: Store, name: str, file: Path | None = None) -> bytes:
        raise OSError(errno.ENOSPC if file else errno.EIO, os.strerror(errno.ENOSPC if file else errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "download", fail)
        with pytest.raises(OSError, match=rf"^ba9-rank0.pt can't be copied to {here} \(No space left on device\)$"):
            newest_complete(place, here)
    monkeypatch.setattr(type(place), "read", fail)
    with pytest.raises(OSError, match=r"^ba9.json can't be read \(Input/output error\)$"):
        newest_complete(place, here)
    [checkpoint, _] = list_checkpoints(place)
    assert checkpoint.batch == 9 and checkpoint.manifest is None
    assert checkpoint.fault == "ba9.json can't be read (Input/output error)"


def test_extra_files_of_outdated_checkpoints_are_deleted(tmp_path: Path) -> None:
    """An earlier attempt with more ranks had written more files."""
    for batch in (1, 2, 3):
        write_checkpoint(tmp_path, batch, sharded=True)
        (tmp_path / f"ep0-ba{batch}" / "__7_0.distcp").touch()
    manifest = write_checkpoint(tmp_path, 4, sharded=True)
    (tmp_path / "ba4.json").unlink()
    uploader = Uploader(tmp_path, str(tmp_path), keep=2)
    uploader.add(manifest)
    assert uploader.wait(10)
    uploader.close()
    assert sorted(str(batch_of(name)) for name in open_store(str(tmp_path)).list()) == list("3333444")


def test_a_checkpoint_is_not_outdated_by_one_that_the_run_could_not_resume_from(tmp_path: Path) -> None:
    """The attempt resumed from 10, since 20 is damaged, and saves 15."""
    _, manifest, _ = (write_checkpoint(tmp_path, batch) for batch in (10, 15, 20))
    flip_bit(tmp_path / "ba20-rank0.pt")
    (tmp_path / "ba15.json").unlink()
    uploader = Uploader(tmp_path, str(tmp_path), keep=1)
    uploader.add(manifest)
    assert uploader.wait(10)
    uploader.close()
    assert newest_path(open_store(str(tmp_path)), tmp_path) == tmp_path / "ba15-rank0.pt"
    assert not (tmp_path / "ba10.json").exists()


def test_a_manifest_survives_writing_and_reading(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path, 5, sharded=True)
    assert read_manifest(open_store(str(tmp_path)), "ba5.json") == manifest
    assert json.loads(manifest.to_bytes())["run"] == {"name": "run", "tokens": 5, "writers": 1}


@pytest.mark.parametrize(
    ("name", "batch", "rank"),
    [
        ("ba40.json", 40, 0),
        ("ba40-rank3.pt", 40, 3),
        ("ep2-ba40/__5_0.distcp", 40, 5),
        ("ep2-ba40/.metadata", 40, 0),
        ("ba40-validating-rank0.pt", 40, 0),
        ("ep2-ba40-validating/__5_0.distcp", 40, 5),
        ("ep2-ba40/__12_1.distcp", 40, 12),
        (rank_manifest_name(40, 7), 40, 7),
        ("ba40.json.bak", None, 0),
        ("latest-rank0.pt", None, 0),
        ("attempts/1.rank0.json", None, 0),
    ],
)
def test_a_file_s_name_tells_its_batch_and_rank(name: str, batch: int | None, rank: int) -> None:
    assert (batch_of(name), rank_of(name)) == (batch, rank)


def test_files_without_a_manifest_are_deleted_before_a_batch(tmp_path: Path) -> None:
    names = ["ba3-rank0.pt", "ba3.rank0.json", "ba4.json", "ba4-rank0.pt", "ba5-rank0.pt", "ba6-rank0.pt", "ba6.json"]
    others = ["ba6.rank0.json", "ba7-validating-rank0.pt", "notes.txt"]
    for name in (*names, *others, "ba6-validating-rank0.pt"):
        (tmp_path / name).touch()
    assert manifest_batches(open_store(str(tmp_path)).list()) == [6, 4]
    uploader_of(tmp_path, keep=-1)._delete_old(open_store(str(tmp_path)), Manifest(6, "ba6-rank0.pt", {}, {}))
    gone = {"ba3-rank0.pt", "ba3.rank0.json", "ba5-rank0.pt"}
    assert {path.name for path in tmp_path.iterdir()} == {*names, *others} - gone
