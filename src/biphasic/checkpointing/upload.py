"""Upload checkpoints in the background, write their manifests, and delete outdated checkpoints."""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from biphasic.amounts import format_seconds
from biphasic.checkpointing.manifest import (
    Entries,
    Known,
    Manifest,
    batch_of,
    file_fault,
    is_replaced,
    manifest_batches,
    manifest_name,
    outdated_checkpoints,
    rank_manifest_name,
    rank_of,
    read_manifest,
)
from biphasic.durations import Duration
from biphasic.errors import UserError, first_line
from biphasic.storage import Store, is_remote, open_store

_POLL_SECONDS = 0.25
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CLOSE_SECONDS = 30.0
_log = logging.getLogger(__name__)


class CheckpointUpload:
    """Uploads one rank's part of a checkpoint: the files in its manifest. After an error it goes on where it was."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._uploaded: set[str] = set()
        self._files = dict(manifest.files)
        self._unread = list(range(1, manifest.run["writers"]))

    def upload(self, rank: int, local_folder: Path, destination: Store) -> None:
        """Upload the rank's files and manifest. Raises an OSError if an upload fails or a stored file has another size."""
        for name, (size, _) in self.manifest.files.items():
            if name in self._uploaded:
                continue
            destination.upload(local_folder / name, name)
            stored = destination.stat(name)
            if stored is None or stored.bytes != size:
                raise OSError(f"{name} arrived with {stored.bytes if stored else 0:,} bytes instead of {size:,}")
            self._uploaded.add(name)
        name = rank_manifest_name(self.manifest.batch, rank)
        if name not in self._uploaded:
            destination.write(name, self.manifest.to_bytes())
            self._uploaded.add(name)

    def complete(self, destination: Store) -> bool:
        """Write the checkpoint's manifest if all ranks have uploaded their parts. Return whether it is complete.

        It is called for rank 0's part. Raises an OSError if the destination can't be reached.
        """
        while self._unread:
            try:
                part = read_manifest(destination, rank_manifest_name(self.manifest.batch, self._unread[0]))
            except (FileNotFoundError, ValueError):
                return False
            # A rank manifest of this name may be from an earlier attempt.
            if part.run != self.manifest.run:
                return False
            self._files |= part.files
            self._unread.pop(0)
        manifest = replace(self.manifest, files=dict(sorted(self._files.items())))
        if file_fault(manifest, destination.list()) is not None:
            return False
        write_manifest(manifest, destination)
        return True


class Uploader:
    """Stores checkpoints where the run saves, in a background thread, oldest first.

    Each rank uploads its files and then a manifest of them. Rank 0's thread waits for the manifests of all ranks, writes
    the checkpoint's manifest, and deletes outdated checkpoints. In a local folder the files are in place already. Failed
    uploads are repeated after growing pauses; training waits for none of this.

    `destination` is the node's `local_folder`, or the bucket prefix that the run saves to. The newest `keep` checkpoints are
    kept there (negative: all), and those that are marked as kept or are at `branch_points`. `local_ranks` are the ranks on
    this node, in order. `resumed` is the batch from which the run resumed. `pending` holds the checkpoints that are not
    uploaded yet.
    """

    def __init__(
        self,
        local_folder: Path,
        destination: str,
        keep: int,
        rank: int = 0,
        local_ranks: range = range(1),
        resumed: int = 0,
        branch_points: Sequence[Duration] = (),
    ):
        self._local_folder, self._destination, self._keep = local_folder, destination, keep
        self._rank, self._local_ranks, self._resumed = rank, local_ranks, resumed
        self._branch_points = branch_points
        self.pending: list[Manifest] = []
        self._known: Known = {}
        self._queue: SimpleQueue[Manifest | None] = SimpleQueue()
        self._closing = Event()
        self._thread = Thread(target=self._work, name="checkpoint-uploads", daemon=True)
        self._thread.start()

    def add(self, manifest: Manifest) -> None:
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
        while (manifest := self._queue.get()) is not None and self._upload_with_retries(CheckpointUpload(manifest)):
            self.pending.remove(manifest)

    def _upload_with_retries(self, upload: CheckpointUpload) -> bool:
        """Return False if the run ended before the upload was done."""
        start, pause, path = time.monotonic(), 0.0, upload.manifest.path
        while True:
            try:
                is_done = self._upload(upload)
            except Exception as error:
                # Each bucket SDK has its own exceptions. On any of them training continues and the local files stay.
                if not pause:
                    message = "checkpoint %s can't be stored in %s (%s); training continues, and the upload is retried"
                    _log.warning(message, path, self._destination, first_line(error))
                pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE) * random.uniform(0.7, 1.0)
                if self._closing.wait(pause):
                    return False
                continue
            if pause:
                waited = format_seconds(time.monotonic() - start)
                _log.warning("checkpoint %s is stored in %s after %s", path, self._destination, waited)
            return is_done

    def _upload(self, upload: CheckpointUpload) -> bool:
        """Return False if the run ended before all ranks had uploaded their files."""
        manifest, destination = upload.manifest, open_store(self._destination)
        upload.upload(self._rank, self._local_folder, destination)
        if self._rank == 0:
            while not upload.complete(destination):
                if self._closing.wait(_POLL_SECONDS):
                    message = "checkpoint %s is incomplete: the run ended before all ranks had uploaded their files"
                    _log.warning(message, manifest.path)
                    return False
            self._delete_old(destination, manifest)
        if is_remote(self._destination):
            self._delete_local_copies(manifest)
        return True

    def _delete_old(self, destination: Store, newest: Manifest) -> None:
        """Delete outdated checkpoints, and files that earlier attempts have left without a manifest.

        Checkpoints newer than the newest one stay: an earlier attempt saved them, and this one could not use them.
        """
        entries = {name: file for name, file in destination.list().items() if (batch_of(name) or 0) <= newest.batch}
        outdated = outdated_checkpoints(destination, entries, self._keep, self._known, self._branch_points)
        # The manifests first, so a partly deleted checkpoint counts as incomplete.
        destination.remove(manifest_name(batch) for batch in outdated)
        complete = {None, newest.batch, *manifest_batches(entries)} - outdated
        destination.remove(name for name in entries if batch_of(name) not in complete or is_replaced(name, newest))

    def _delete_local_copies(self, uploaded: Manifest) -> None:
        """Delete local files of checkpoints that are older than the uploaded one, or that it replaces.

        Each rank deletes its own files. Local rank 0 also deletes those of ranks on other nodes that were downloaded when
        the run started. Later ones are there if nodes share the folder, and those ranks may still have to upload them.
        """
        local_folder = open_store(str(self._local_folder))
        pending = {name for manifest in list(self.pending) for name in manifest.files}
        old = [rank_manifest_name(uploaded.batch, self._rank)]
        for name in local_folder.list():
            batch, rank = batch_of(name), rank_of(name)
            if batch is None or name in pending or not (batch < uploaded.batch or is_replaced(name, uploaded)):
                continue
            was_downloaded = batch <= self._resumed and rank not in self._local_ranks
            if rank == self._rank or (was_downloaded and self._rank == self._local_ranks[0]):
                old.append(name)
        local_folder.remove(old)


def write_manifest(manifest: Manifest, destination: Store) -> None:
    """Write a checkpoint's manifest and delete the ranks' manifests."""
    destination.write(manifest.name, manifest.to_bytes())
    destination.remove(rank_manifest_name(manifest.batch, rank) for rank in range(manifest.run["writers"]))


def require_moved(local_folder: Path, destination: Store) -> None:
    """Raise a UserError if the local folder of a run that saves to a bucket has complete checkpoints that the bucket lacks.

    The run saved there before. It would ignore these checkpoints, and delete them after its first upload. Checkpoints that
    are downloaded or not uploaded yet have no manifest there.
    """
    local = manifest_batches(open_store(str(local_folder)).list())
    missing = set(local).difference(manifest_batches(destination.list())) if local else set[int]()
    if missing:
        raise UserError(
            f"checkpoint.folder {destination.root}: lacks checkpoints that this run has saved to {local_folder} (newest: "
            f"{manifest_name(max(missing))}): copy that folder's files there, or choose another output"
        )


def upload_pending(local_folder: Path, destination: Store) -> None:
    """Upload the ranks' parts that an earlier attempt wrote to the local folder but did not upload.

    Checkpoints older than the destination's newest complete one are not uploaded. Raises an OSError if the destination
    can't be reached.
    """
    local = open_store(str(local_folder))
    entries = local.list()
    parts = list(_pending_parts(local, entries))
    uploaded = manifest_batches(destination.list()) if parts else []
    for rank, manifest in parts:
        if manifest.batch > max(uploaded, default=-1) and file_fault(manifest, entries) is None:
            message = "checkpoint %s was not uploaded to %s when the last attempt ended; uploading it now"
            _log.warning(message, manifest.path, destination.root)
            CheckpointUpload(manifest).upload(rank, local_folder, destination)


def write_missing_manifests(destination: Store, entries: Entries) -> int:
    """Write missing manifests of checkpoints that all ranks have uploaded, and return their number.

    `entries` are the destination's. Raises an OSError if it can't be reached.
    """
    count = 0
    # Rank 0's manifest tells how many ranks there are.
    for _, first in _pending_parts(destination, {name: entries[name] for name in entries if rank_of(name) == 0}):
        if all(rank_manifest_name(first.batch, rank) in entries for rank in range(first.run["writers"])):
            count += CheckpointUpload(first).complete(destination)
    return count


def _pending_parts(folder: Store, entries: Entries) -> Iterator[tuple[int, Manifest]]:
    """Yield the rank and the manifest of each rank's part of a checkpoint that has no manifest."""
    complete = manifest_batches(entries)
    for name in entries:
        if ".rank" in name and batch_of(name) not in {None, *complete}:
            with suppress(ValueError):
                yield rank_of(name), read_manifest(folder, name)
