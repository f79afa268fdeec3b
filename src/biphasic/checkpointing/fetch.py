"""Find the checkpoint that a run starts from, the same one on all ranks, and download checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from biphasic.checkpointing.manifest import (
    Manifest,
    batch_of,
    download_files,
    list_checkpoints,
    manifest_name,
    newest_complete,
    newest_first,
    read_manifest,
)
from biphasic.checkpointing.run_lock import LOCK_FILE
from biphasic.checkpointing.start_rules import ResumeGuard, batch_in_path, checkpoint_folder
from biphasic.checkpointing.upload import require_moved, upload_pending, write_missing_manifests
from biphasic.errors import first_line
from biphasic.model.checkpoint import is_checkpoint
from biphasic.storage import is_remote, join, open_store, user_errors

if TYPE_CHECKING:
    from biphasic.checkpointing.rank_group import RankGroup


def find_resume_point(destination: str, local_folder: Path, guard: ResumeGuard, ranks: RankGroup) -> Manifest | None:
    """Find the newest complete checkpoint of a run, and download it to every node's `local_folder`.

    Pending uploads of earlier attempts on any node are completed first. Other runs' checkpoints are skipped. Returns
    None if there is none. Raises a UserError if the destination can't be read from every node, holds only other runs'
    checkpoints, or is a bucket that lacks some that the run saved to the local folder before.
    """
    place = f"checkpoint.folder {destination}"

    def upload() -> None:
        with user_errors(f"{place}: can't be used"):
            store = open_store(destination)
            # A machine that can't reach the bucket should fail now, not at its first upload.
            store.stat(LOCK_FILE)
            require_moved(local_folder, store)
            upload_pending(local_folder, store)

    if is_remote(destination):
        ranks.once_per_machine(upload)

    def find() -> Manifest | None:
        with user_errors(f"{place}: can't be used"):
            folder = open_store(destination)
            # Listed once, by one rank: in a bucket of many checkpoints it takes seconds.
            entries = folder.list()
            if write_missing_manifests(folder, entries):
                entries = folder.list()
            own = guard.own_checkpoints(newest_first(folder, entries))
            return newest_complete(folder, local_folder, own)

    manifest = ranks.on_first_rank(find)

    def download() -> None:
        if manifest is not None and not ranks.is_first:
            advice = "" if is_remote(destination) else "; with several machines, all of them have to see this folder"
            with user_errors(f"{place}: rank {ranks.rank} can't get {manifest.path}{advice}", ValueError):
                download_files(manifest, open_store(destination), local_folder)
                # Rank 0 deletes older ones as it uploads. Other nodes may have only what they downloaded at each start.
                local = open_store(str(local_folder))
                if is_remote(destination):
                    local.remove(name for name in local.list() if (batch_of(name) or manifest.batch) < manifest.batch)

    ranks.once_per_machine(download)
    return manifest


def fetch_branch_point(downloads: Path, guard: ResumeGuard, ranks: RankGroup) -> tuple[str, Manifest, str]:
    """Find the checkpoint that `start_from` leads to. Return its path or URL, its manifest and its local path.

    It is used in place if it is local, and otherwise downloaded to `downloads`. Raises a UserError if there is no
    complete checkpoint whose past is this run's own, or if it is damaged.
    """
    folder, manifest = ranks.on_first_rank(guard.find_branch_point)
    place, local_folder = join(folder, manifest.path), downloads if is_remote(folder) else Path(folder)

    def download() -> None:
        with _explained(place):
            download_files(manifest, open_store(folder), local_folder)

    ranks.once_per_machine(download)
    return place, manifest, str(local_folder / manifest.path)


def local_checkpoint(path: str, local_folder: Path) -> str:
    """Return the local path of a checkpoint, downloading it if necessary. For a single process.

    `path` is a local path or URL of a checkpoint (`ba18000-rank0.pt` or `ep0-ba18000`), or of a run's folder or one that it
    saves to, whose newest complete checkpoint is used. Other local paths and hub ids are returned unchanged. Raises a
    UserError if there is no complete checkpoint, or if it is damaged or can't be read.
    """
    with _explained(path):
        batch = batch_in_path(path)
        if not is_remote(path) and (batch is not None or is_checkpoint(path) or Path(path, "config.json").exists()):
            return path
        folder = open_store(checkpoint_folder(path))
        if batch is None:
            if not is_remote(path) and all(batch_of(name) is None for name in folder.list()):
                return path
            local_folder = local_folder if is_remote(folder.root) else Path(folder.root)
            manifest = newest_complete(folder, local_folder)
            if manifest is None:
                faults = [f"ba{found.batch}: {found.fault or 'a file is damaged'}" for found in list_checkpoints(folder)]
                raise ValueError("; ".join(["it holds no complete checkpoint", *faults[:1]]))
        else:
            name = manifest_name(batch)
            try:
                manifest = read_manifest(folder, name)
            except OSError as error:
                raise type(error)(f"{first_line(error)}; its manifest is {name}") from error
            if path.rstrip("/").rpartition("/")[2] != manifest.path:
                raise ValueError(f"{name} is the manifest of {manifest.path}")
            download_files(manifest, folder, local_folder)
    return str(local_folder / manifest.path)


def _explained(path: str) -> AbstractContextManager[None]:
    """Raise the block's OSErrors and ValueErrors as UserErrors that name the checkpoint."""
    return user_errors(f"checkpoint {path}: can't be used", ValueError)
