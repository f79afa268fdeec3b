"""A checkpoint by its address, on this machine: from a bucket, or the newest one of a folder; needs no other ranks."""

from __future__ import annotations

from pathlib import Path

from biphasic.checkpointing.manifest import Manifest, batch_of, bring, checkpoints_in, newest
from biphasic.config.errors import UserError
from biphasic.model.checkpoint import is_checkpoint
from biphasic.storage import is_remote, short, store


def fetched(path: str, folder: Path) -> str:
    """A checkpoint's path on this machine.

    Args:
        path: a checkpoint, `ba18000-rank0.pt` or `ep0-ba18000`, on this machine or in a bucket, or a folder where a run
            saves: its newest complete one. What is neither and lies on no bucket (a model's folder, a hub id) is given
            back as it is.
        folder: where files of a bucket are brought to, each compared with its hash. What is there already and right isn't
            fetched again.

    Raises:
        UserError: nothing complete is there, or it is damaged, or it can't be read.
    """
    if is_remote(path):
        return fetch_named(path, folder) if _batch_at(path) is not None else _newest_of(path, folder)
    if is_checkpoint(path) or not _is_run_s(Path(path)):
        return path
    return _newest_of(path, Path(path))


def fetch_named(path: str, folder: Path) -> str:
    """Bring one checkpoint of a bucket here, and compare its files with their hashes.

    Args:
        path: its address, `s3://…/ba18000-rank0.pt` or `s3://…/ep0-ba18000`; beside it lies its manifest.
        folder: where its files go.

    Raises:
        UserError: it isn't there, is not complete, or is damaged.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    batch = _batch_at(path)
    if batch is None:
        raise _unusable(path, "its name is none of a checkpoint's: ba18000-rank0.pt or ep0-ba18000")
    try:
        manifest = Manifest.of(store(parent).read(f"ba{batch}.json"))
        if name != manifest.path:
            raise _unusable(path, f"what ba{batch}.json is the manifest of is {manifest.path}")
        fault = bring(manifest, store(parent), folder)
    except (OSError, ValueError) as error:
        raise _unusable(path, f"{short(error)}; its manifest is ba{batch}.json") from None
    if fault is not None:
        raise _unusable(path, fault)
    return str(folder / name)


def _newest_of(path: str, folder: Path) -> str:
    place = store(path)
    try:
        found = newest(place, folder)
        if found is None:
            faults = [f"of ba{one.batch}, {one.fault or 'a file is damaged'}" for one in checkpoints_in(place)]
            raise _unusable(path, "; ".join(["no complete checkpoint lies there", *faults[:1]]))
    except OSError as error:
        raise _unusable(path, short(error)) from None
    return str(folder / found.path)


def _is_run_s(folder: Path) -> bool:
    """Whether checkpoints lie in a folder of this machine."""
    if not folder.is_dir():
        return False
    return any(batch_of(f"{one.name}/" if one.is_dir() else one.name) is not None for one in folder.iterdir())


def _batch_at(path: str) -> int | None:
    name = path.rstrip("/").rpartition("/")[2]
    return batch_of(name) if name.endswith(".pt") else batch_of(f"{name}/")


def _unusable(path: str, reason: str) -> UserError:
    return UserError(f"checkpoint {path}: can't be used ({reason})")
