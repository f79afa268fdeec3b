"""Find the checkpoint that a run resumes from, and download checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from biphasic.checkpointing.manifest import (
    Entries,
    Manifest,
    batch_of,
    download_files,
    list_checkpoints,
    manifest_name,
    newest_batch,
    newest_complete,
    not_a_manifest_message,
)
from biphasic.checkpointing.run_lock import LOCK_FILE
from biphasic.checkpointing.start import BranchPoint, find_branch_point, foreign_folder_message, other_run_message
from biphasic.checkpointing.store import upload_pending, write_missing_manifests
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import UserError
from biphasic.model.checkpoint import is_checkpoint
from biphasic.storage import Store, first_line, is_remote, open_store, user_error

if TYPE_CHECKING:
    from biphasic.checkpointing.stopping import ProcessGroup


def find_resume_point(
    destination: str, local_folder: Path, config: PretrainConfig, ranks: ProcessGroup
) -> Manifest | None:
    """Find the newest complete checkpoint, the same one for all ranks, and download it to every node.

    Args:
        destination: folder or bucket prefix that the run saves to.
        local_folder: folder to download to.
        config: the run's configuration. Other runs' checkpoints are skipped.
        ranks: process group of all ranks.

    Returns:
        The manifest (Composer loads `local_folder / manifest.path`), or None if the run starts from scratch.

    Raises:
        UserError: the destination can't be read from every node, or holds only another run's checkpoints.
    """
    # Listed once, by one rank: in a bucket of many checkpoints it takes seconds.
    entries, fault = None, None
    if ranks.rank == 0:
        try:
            entries = open_store(destination).entries()
        except OSError as error:
            fault = user_error(f"checkpoint.folder {destination}: can't be reached ({first_line(error)})", error)
    ranks.raise_first(fault)
    if is_remote(destination) and _upload_pending(destination, local_folder, entries, ranks):
        entries = None
    other_runs: list[str] = []

    def reject_other_run(manifest: Manifest) -> str | None:
        fault = other_run_message(manifest, config)
        if fault is not None:
            other_runs.append(manifest.run["name"])
        return fault

    newest = None
    if ranks.rank == 0:
        try:
            folder = open_store(destination)
            entries = folder.entries() if entries is None else entries
            if write_missing_manifests(folder, entries):
                entries = folder.entries()
            newest = newest_complete(folder, local_folder, reject_other_run, entries)
        except OSError as error:
            fault = user_error(f"checkpoint.folder {destination}: can't be read ({first_line(error)})", error)
        if newest is None and other_runs:
            fault = fault or UserError(foreign_folder_message(destination, other_runs[0]))
    manifest: Manifest | None = ranks.broadcast(newest)
    if manifest is not None and ranks.local_rank == 0 and ranks.rank:
        place = f"checkpoint.folder {destination}: rank {ranks.rank}"
        try:
            missing = download_files(manifest, open_store(destination), local_folder)
            if missing is not None:
                fault = UserError(
                    f"{place} can't get {manifest.path} ({missing}); with several machines it has to be a bucket, or a "
                    "folder that all of them see"
                )
        except OSError as error:
            fault = user_error(f"{place} can't get {manifest.path} ({first_line(error)})", error)
    ranks.raise_first(fault)
    return manifest


def _upload_pending(destination: str, local_folder: Path, entries: Entries | None, ranks: ProcessGroup) -> bool:
    """Upload what earlier attempts have left on each machine. Return whether any machine has uploaded anything.

    `entries` are the destination's, on rank 0.
    """
    newest, counts = ranks.broadcast(None if entries is None else newest_batch(entries)), [0]

    def upload() -> None:
        try:
            store = open_store(destination)
            # A machine that can't reach the bucket shows it now, not at its first upload.
            store.stat(LOCK_FILE)
            counts.append(upload_pending(local_folder, store, newest))
        except OSError as error:
            message = f"checkpoint.folder {destination}: can't be reached ({first_line(error)})"
            raise user_error(message, error) from None

    ranks.once_per_machine(upload)
    return bool(ranks.maximum(sum(counts)))


def fetch_branch_point(config: PretrainConfig, ranks: ProcessGroup) -> tuple[BranchPoint, str]:
    """Find the checkpoint of another run that `start_from` leads to, the same one for all ranks.

    It is used in place if it is local. One in a bucket is downloaded to `from` in the run's folder while all ranks wait.

    Returns:
        The checkpoint, and its local path.

    Raises:
        UserError: there is no complete checkpoint whose past is this run's own, or it is damaged.
    """
    assert config.start_from is not None
    point, fault = None, None
    if ranks.rank == 0:
        try:
            point = find_branch_point(config.start_from, config)
        except UserError as error:
            fault = error
    ranks.raise_first(fault)
    point = ranks.broadcast(point)
    local_folder = config.run_folder / "from" if is_remote(point.folder) else Path(point.folder)

    def download() -> None:
        _download(point.path, point.manifest, open_store(point.folder), local_folder)

    ranks.once_per_machine(download)
    return point, str(local_folder / point.manifest.path)


def fetch_initial_weights(config: PretrainConfig, ranks: ProcessGroup) -> str:
    """Return the local path of `model.init_from`. A checkpoint in a bucket is downloaded while all ranks wait.

    Raises:
        UserError: there is no complete checkpoint, or it is damaged or can't be read.
    """
    assert config.model.init_from is not None
    path, local_paths = config.model.init_from, list[str]()
    ranks.once_per_machine(lambda: local_paths.append(local_checkpoint(path, config.run_folder / "init")))
    return ranks.broadcast(local_paths[0] if local_paths else None)


def local_checkpoint(path: str, local_folder: Path) -> str:
    """Return the local path of a checkpoint, downloading it if necessary. For a single process.

    Args:
        path: local path or URL of a checkpoint (`ba18000-rank0.pt` or `ep0-ba18000`), or of a folder that a run saves to,
            whose newest complete checkpoint is used. Other local paths and hub ids are returned unchanged.
        local_folder: folder to download to. A file with the right hash is not downloaded again.

    Raises:
        UserError: the path has no complete checkpoint, or the checkpoint is damaged or can't be read.
    """
    if is_remote(path):
        if _batch_in_path(path) is not None:
            return _download_named(path, local_folder)
        return _newest_in(path, local_folder)
    if is_checkpoint(path) or not _holds_checkpoints(Path(path)):
        return path
    return _newest_in(path, Path(path))


def _download_named(path: str, local_folder: Path) -> str:
    parent, _, name = path.rstrip("/").rpartition("/")
    batch = _batch_in_path(path)
    if batch is None:
        raise _unusable(path, "expected a checkpoint's name: ba18000-rank0.pt or ep0-ba18000")
    file, folder = manifest_name(batch), open_store(parent)
    try:
        manifest = Manifest.from_bytes(folder.read(file))
    except ValueError as error:
        raise _unusable(path, not_a_manifest_message(file, error)) from None
    except OSError as error:
        raise _unusable(path, f"{first_line(error)}; its manifest is {file}", error) from None
    if name != manifest.path:
        raise _unusable(path, f"{file} is the manifest of {manifest.path}")
    _download(path, manifest, folder, local_folder)
    return str(local_folder / name)


def _download(path: str, manifest: Manifest, folder: Store, local_folder: Path) -> None:
    try:
        fault = download_files(manifest, folder, local_folder)
    except OSError as error:
        raise _unusable(path, first_line(error), error) from None
    if fault is not None:
        raise _unusable(path, fault)


def _newest_in(path: str, local_folder: Path) -> str:
    folder = open_store(path)
    try:
        manifest = newest_complete(folder, local_folder)
        if manifest is None:
            faults = [f"ba{found.batch}: {found.fault or 'a file is damaged'}" for found in list_checkpoints(folder)]
            raise _unusable(path, "; ".join(["it holds no complete checkpoint", *faults[:1]]))
    except OSError as error:
        raise _unusable(path, first_line(error), error) from None
    return str(local_folder / manifest.path)


def _holds_checkpoints(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return any(batch_of(f"{path.name}/" if path.is_dir() else path.name) is not None for path in folder.iterdir())


def _batch_in_path(path: str) -> int | None:
    name = path.rstrip("/").rpartition("/")[2]
    return batch_of(name) if name.endswith(".pt") else batch_of(f"{name}/")


def _unusable(path: str, reason: str, error: OSError | None = None) -> UserError:
    return user_error(f"checkpoint {path}: can't be used ({reason})", error)
