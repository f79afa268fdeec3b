"""Uploads of several ranks, without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from biphasic.checkpointing.manifest import Manifest, list_checkpoints
from biphasic.checkpointing.upload import CheckpointUpload, Uploader, write_missing_manifests
from biphasic.storage import file_hash, open_store


def rank_manifest(folder: Path, rank: int, attempt: str) -> Manifest:
    """A rank's part of a checkpoint of two ranks."""
    name = f"ep0-ba4/__{rank}_0.distcp"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{rank} of {attempt}")
    files = {name: ((folder / name).stat().st_size, file_hash(folder / name))}
    return Manifest(4, "ep0-ba4", files, {"name": "run", "attempt": attempt, "tokens": 4, "writers": 2})


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
