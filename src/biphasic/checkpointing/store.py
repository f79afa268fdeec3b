"""Upload checkpoints in the background, write their manifests, and delete outdated checkpoints."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from biphasic.amounts import format_seconds
from biphasic.checkpointing.manifest import (
    Manifest,
    abandoned_files,
    batch_of,
    batch_of_rank_manifest,
    delete_checkpoint,
    manifest_name,
    newest_batch,
    outdated_checkpoints,
    rank_manifest_name,
    rank_of,
)
from biphasic.storage import Store, StoredFile, first_line, is_remote, open_store

_POLL_SECONDS = 0.25
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CLOSE_SECONDS = 30.0
_log = logging.getLogger(__name__)


class Uploader:
    """Uploads this rank's checkpoint files in a background thread, oldest first. Rank 0 then writes the manifest.

    Ranks don't wait for each other during training: each rank uploads a manifest of its own files, and rank 0's background
    thread waits for these manifests. If the destination can't be reached, uploads are retried with growing pauses.

    Args:
        local_folder: this node's folder of checkpoints.
        destination: the same folder, or the bucket prefix that the run saves to.
        keep: number of newest checkpoints to keep at the destination, besides those marked as kept; negative: all.
        rank: this process's rank.
        local_ranks: ranks on this node, in order.

    Attributes:
        pending: checkpoints that are not uploaded yet.
        completed: batch of the newest checkpoint that this rank has uploaded.
    """

    def __init__(self, local_folder: Path, destination: str, keep: int, rank: int = 0, local_ranks: range = range(1)):
        self._local_folder, self._destination, self._keep = local_folder, destination, keep
        self._rank, self._local_ranks = rank, local_ranks
        self.pending: list[Manifest] = []
        self.completed = 0
        self._queue: SimpleQueue[Manifest | None] = SimpleQueue()
        self._closing = Event()
        self._thread = Thread(target=self._work, name="checkpoint-uploads", daemon=True)
        self._thread.start()

    def add(self, manifest: Manifest) -> None:
        """Queue this rank's files of a checkpoint."""
        self.pending.append(manifest)
        self._queue.put(manifest)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for pending uploads. Return whether all are done."""
        end = time.monotonic() + timeout
        while self.pending and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        return not self.pending

    def close(self) -> None:
        """Finish the current upload, without waiting for other ranks or for a destination that can't be reached."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (manifest := self._queue.get()) is not None and self._upload_with_retries(manifest):
            self.pending.remove(manifest)
            self.completed = manifest.batch

    def _upload_with_retries(self, manifest: Manifest) -> bool:
        """Return False if the run ended before the upload was done."""
        start, pause = time.monotonic(), 0.0
        while True:
            try:
                uploaded = self._upload(manifest)
                break
            except Exception as error:
                # Each bucket SDK has its own exceptions. On any of them training continues and the local files stay.
                if not pause:
                    message = "checkpoint %s can't be stored in %s (%s); training continues, and the upload is retried"
                    _log.warning(message, manifest.path, self._destination, first_line(error))
            pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE) * random.uniform(0.7, 1.0)
            if self._closing.wait(pause):
                return False
        if pause:
            waited = format_seconds(time.monotonic() - start)
            _log.warning("checkpoint %s is stored in %s after %s", manifest.path, self._destination, waited)
        return uploaded

    def _upload(self, manifest: Manifest) -> bool:
        """Return False if the run ended before all ranks had uploaded their files."""
        destination, remote = open_store(self._destination), is_remote(self._destination)
        upload_files(manifest, self._rank, self._local_folder, destination)
        if self._rank == 0:
            while not complete_checkpoint(manifest, destination):
                if self._closing.wait(_POLL_SECONDS):
                    message = "checkpoint %s is incomplete: the run ended before all ranks had uploaded their files"
                    _log.warning(message, manifest.path)
                    return False
        if self._rank == 0 or remote:
            files = destination.list()
            if self._rank == 0:
                self._delete_old(destination, files, manifest.batch)
            if remote:
                self._delete_local_copies(newest_batch(files))
        return True

    def _delete_old(self, destination: Store, files: dict[str, StoredFile], batch: int) -> None:
        for old in outdated_checkpoints(destination, files, self._keep):
            delete_checkpoint(old, destination)
            # Files of this batch from an attempt with more ranks now have no manifest, so they count as abandoned.
            for name in (old.name, *old.files):
                del files[name]
        destination.remove(abandoned_files(files, batch))

    def _delete_local_copies(self, uploaded: int) -> None:
        """Delete local files of checkpoints older than the newest uploaded one.

        Each rank deletes its own files. Local rank 0 also deletes downloaded files of ranks on other nodes.
        """
        local_folder = open_store(str(self._local_folder))
        pending = {name for manifest in list(self.pending) for name in manifest.files}

        def is_ours(rank: int) -> bool:
            return rank == self._rank or (self._rank == self._local_ranks[0] and rank not in self._local_ranks)

        old = [
            name
            for name in local_folder.list()
            if (batch := batch_of(name)) is not None
            and batch < uploaded
            and name not in pending
            and is_ours(rank_of(name))
        ]
        local_folder.remove([*old, rank_manifest_name(uploaded, self._rank)])


def upload_files(manifest: Manifest, rank: int, local_folder: Path, destination: Store) -> None:
    """Upload a rank's files, compare their sizes, and upload the rank's manifest.

    Raises:
        OSError: an upload failed or is incomplete.
    """
    for name, (size, _) in manifest.files.items():
        destination.upload(local_folder / name, name)
        stored = destination.stat(name)
        if stored is None or stored.bytes != size:
            raise OSError(f"{name} arrived with {stored.bytes if stored else 0:,} bytes instead of {size:,}")
    destination.write(rank_manifest_name(manifest.batch, rank), manifest.to_bytes())


def complete_checkpoint(manifest: Manifest, destination: Store) -> bool:
    """Write the manifest of a checkpoint if all its ranks have uploaded their files.

    Args:
        manifest: one rank's manifest.
        destination: store that the run saves to.

    Returns:
        Whether the checkpoint is complete.

    Raises:
        OSError: the destination can't be reached.
    """
    files, uploaded = dict(manifest.files), destination.list()
    for rank in range(manifest.run["writers"]):
        name = rank_manifest_name(manifest.batch, rank)
        try:
            other = Manifest.from_bytes(destination.read(name)) if name in uploaded else None
        except ValueError:
            return False
        # A rank manifest of this name may be from an earlier attempt.
        if other is None or other.run != manifest.run:
            return False
        files |= other.files
    complete = replace(manifest, files=dict(sorted(files.items())))
    if not _all_present(complete, uploaded):
        return False
    write_manifest(complete, destination)
    return True


def write_manifest(manifest: Manifest, destination: Store) -> None:
    """Write a checkpoint's manifest and delete the ranks' manifests."""
    destination.write(manifest.name, manifest.to_bytes())
    destination.remove(rank_manifest_name(manifest.batch, rank) for rank in range(manifest.run["writers"]))


def upload_pending(local_folder: Path, destination: Store) -> None:
    """Upload checkpoint files that an earlier attempt wrote to the local folder but did not upload.

    Raises:
        OSError: the destination can't be reached.
    """
    local, uploaded = open_store(str(local_folder)), newest_batch(destination.list())
    for name, manifest in _rank_manifests(local).items():
        if manifest.batch > uploaded and _all_present(manifest, local.list()):
            message = "checkpoint %s was not stored in %s when the last attempt ended; it is stored now"
            _log.warning(message, manifest.path, destination.root)
            upload_files(manifest, rank_of(name), local_folder, destination)


def write_missing_manifests(destination: Store) -> None:
    """Write missing manifests of checkpoints that all ranks have uploaded.

    Raises:
        OSError: the destination can't be reached.
    """
    for manifest in _rank_manifests(destination).values():
        if destination.stat(manifest.name) is None:
            complete_checkpoint(manifest, destination)


def _rank_manifests(folder: Store) -> dict[str, Manifest]:
    """Return the ranks' manifests of checkpoints without a manifest, by file name."""
    files, manifests = folder.list(), dict[str, Manifest]()
    for name in files:
        if (batch := batch_of_rank_manifest(name)) is not None and manifest_name(batch) not in files:
            with suppress(ValueError):
                manifests[name] = Manifest.from_bytes(folder.read(name))
    return manifests


def _all_present(manifest: Manifest, files: dict[str, StoredFile]) -> bool:
    return all(name in files and files[name].bytes == size for name, (size, _) in manifest.files.items())
