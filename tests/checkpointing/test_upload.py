"""Uploads of several ranks, without a run."""

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from biphasic.checkpointing.manifest import Manifest, list_checkpoints
from biphasic.checkpointing.upload import CheckpointUpload, Uploader, write_missing_manifests
from biphasic.storage import S3Store, file_hash, open_store
from helpers.buckets import bucket_for


def rank_manifest(folder: Path, rank: int, attempt: str, batch: int = 4) -> Manifest:
    """A rank's part of a checkpoint of two ranks."""
    name = f"ep0-ba{batch}/__{rank}_0.distcp"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{rank} of {attempt}")
    files = {name: ((folder / name).stat().st_size, file_hash(folder / name))}
    run = {"name": "run", "attempt": attempt, "tokens": batch, "writers": 2, "kept": False}
    return Manifest(batch, f"ep0-ba{batch}", files, run)


def test_rank_0_waits_for_the_same_attempt_s_files(tmp_path: Path) -> None:
    local, destination = tmp_path / "local", tmp_path / "destination"
    CheckpointUpload(rank_manifest(local, 1, "earlier")).upload(1, local, open_store(str(destination)))
    first, second = (Uploader(local, str(destination), -1, rank, range(2)) for rank in range(2))
    first.add(rank_manifest(local, 0, "current"))
    assert not first.wait(0.6)
    assert list_checkpoints(open_store(str(destination)))[0].manifest is None
    second.add(rank_manifest(local, 1, "current"))
    assert first.wait(10) and second.wait(10)
    for uploader in (first, second):
        uploader.close()
    [checkpoint] = list_checkpoints(open_store(str(destination)))
    assert checkpoint.manifest is not None
    assert list(checkpoint.manifest.files) == ["ep0-ba4/__0_0.distcp", "ep0-ba4/__1_0.distcp"]
    assert (destination / "ep0-ba4" / "__1_0.distcp").read_text() == "1 of current"
    assert not list(destination.glob("*.rank*"))


@pytest.mark.parametrize("attempts", [("one", "one"), ("one", "two")])
def test_the_next_start_completes_what_all_ranks_have_uploaded(tmp_path: Path, attempts: tuple[str, str]) -> None:
    local, destination = tmp_path / "local", open_store(str(tmp_path / "destination"))
    for rank, attempt in enumerate(attempts):
        CheckpointUpload(rank_manifest(local, rank, attempt)).upload(rank, local, destination)
    write_missing_manifests(destination, destination.list())
    [checkpoint] = list_checkpoints(destination)
    assert (checkpoint.manifest is not None) == (attempts[0] == attempts[1])


def test_nodes_that_share_a_working_folder_leave_each_other_s_files(
    tmp_path: Path, s3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1, on another node, has uploaded batch 8 before rank 0 has uploaded batch 4."""
    local, place = tmp_path / "shared", f"s3://{bucket_for(s3, 'shared-folder')}/run"
    upload, may_upload = S3Store.upload, Event()

    def upload_slowly(store: S3Store, file: Path, name: str) -> None:
        assert "/__0_" not in name or may_upload.wait(60)
        upload(store, file, name)

    monkeypatch.setattr(S3Store, "upload", upload_slowly)
    first, second = (Uploader(local, place, -1, rank, range(rank, rank + 1)) for rank in range(2))
    for batch in (4, 8):
        first.add(rank_manifest(local, 0, "current", batch))
        second.add(rank_manifest(local, 1, "current", batch))
    assert second.wait(60)
    may_upload.set()
    assert first.wait(60)
    for uploader in (first, second):
        uploader.close()
    assert all(checkpoint.manifest for checkpoint in list_checkpoints(open_store(place)))
    assert [checkpoint.batch for checkpoint in list_checkpoints(open_store(place))] == [8, 4]
    assert sorted(path.name for path in local.iterdir()) == ["ep0-ba8"]


def test_checkpoints_wait_for_a_bucket_that_is_unavailable(
    tmp_path: Path, s3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training meanwhile continues (tests/faults/test_network.py)."""
    place, upload, failures = f"s3://{bucket_for(s3, 'upload-away')}/run", S3Store.upload, [OSError("503 SlowDown")] * 3

    def refuse(store: S3Store, file: Path, name: str) -> None:
        if failures:
            raise failures.pop()
        upload(store, file, name)

    monkeypatch.setattr(S3Store, "upload", refuse)
    monkeypatch.setattr("biphasic.checkpointing.upload._FIRST_PAUSE", 0.05)
    uploader = Uploader(tmp_path, place, -1)
    for batch in (2, 4, 6):
        manifest = rank_manifest(tmp_path, 0, "current", batch)
        uploader.add(replace(manifest, run={**manifest.run, "writers": 1}))
    assert uploader.wait(60)
    uploader.close()
    assert [checkpoint.batch for checkpoint in list_checkpoints(open_store(place)) if checkpoint.manifest] == [6, 4, 2]
    assert caplog.text.count("can't be stored in") == 1 and "503 SlowDown" in caplog.text
    assert "checkpoint ep0-ba2 is stored in" in caplog.text
