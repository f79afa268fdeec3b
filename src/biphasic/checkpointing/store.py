"""Upload checkpoints in the background, write their manifests, and delete outdated checkpoints."""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from biphasic.amounts import format_seconds
from biphasic.checkpointing.manifest import (
    Entries,
    Manifest,
    abandoned_files,
    batch_of,
    batch_of_rank_manifest,
    delete_checkpoint,
    files_beside,
    is_replaced,
    manifest_name,
    outdated_checkpoints,
    rank_manifest_name,
    rank_of,
)
from biphasic.storage import Store, StoredFile, first_line, is_remote, open_store

_POLL_SECONDS = 0.25
_READERS = 8
"""Number of ranks' manifests that are read at the same time."""
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
        self._kept: dict[str, StoredFile] = {}
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
        start, pause, upload = time.monotonic(), 0.0, _Upload(manifest)
        while True:
            try:
                uploaded = self._upload(upload)
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

    def _upload(self, upload: _Upload) -> bool:
        """Return False if the run ended before all ranks had uploaded their files."""
        manifest, destination = upload.manifest, open_store(self._destination)
        upload_files(manifest, self._rank, self._local_folder, destination, upload.uploaded)
        newest = manifest.batch
        if self._rank == 0:
            while not upload.is_complete:
                upload.is_complete = complete_checkpoint(upload.ranks, destination)
                if not upload.is_complete and self._closing.wait(_POLL_SECONDS):
                    message = "checkpoint %s is incomplete: the run ended before all ranks had uploaded their files"
                    _log.warning(message, manifest.path)
                    return False
            self._delete_old(destination, manifest)
        elif is_remote(self._destination):
            newest = self._newest_complete(destination, manifest.batch)
        if is_remote(self._destination):
            self._delete_local_copies(newest, manifest)
        return True

    def _newest_complete(self, destination: Store, batch: int) -> int:
        """Return the newest complete checkpoint up to a batch, of those with files in the local folder; -1 if none is.

        Its manifest is asked for, because if all ranks listed the destination, the requests would grow with their square.
        """
        names = open_store(str(self._local_folder)).entries()
        batches = {found for name in names if (found := batch_of(name)) is not None and found <= batch}
        complete = (one for one in sorted(batches, reverse=True) if destination.stat(manifest_name(one)) is not None)
        return next(complete, -1)

    def _delete_old(self, destination: Store, newest: Manifest) -> None:
        entries = destination.entries()
        # Newer ones are from an earlier attempt, and this one did not resume from them because they can't be used.
        own = {name: file for name, file in entries.items() if (batch_of(name) or 0) <= newest.batch}
        for old in outdated_checkpoints(destination, own, self._keep, self._kept):
            delete_checkpoint(old, destination)
            # Files of this batch from an attempt with more ranks now have no manifest, so they count as abandoned.
            for name in (old.name, *old.files):
                entries.pop(name, None)
        abandoned = list[str]()
        for name in abandoned_files(entries, newest):
            abandoned += destination.list(name.rstrip("/")) if name.endswith("/") else [name]
        destination.remove(abandoned)

    def _delete_local_copies(self, uploaded: int, manifest: Manifest) -> None:
        """Delete local files of checkpoints older than the newest uploaded one, and those that `manifest` replaces.

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
            and (batch < uploaded or is_replaced(name, manifest))
            and name not in pending
            and is_ours(rank_of(name))
        ]
        local_folder.remove([*old, rank_manifest_name(uploaded, self._rank)])


class RankManifests:
    """Reads the manifests that a checkpoint's ranks upload after their files, each of them once.

    Args:
        manifest: rank 0's manifest. The others' must be of the same attempt.

    Attributes:
        manifest: rank 0's manifest, with the files of all ranks read so far.
    """

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._missing = list(range(1, manifest.run["writers"]))

    def read(self, destination: Store) -> bool:
        """Read the manifests that were uploaded since the last call. Return whether all ranks' manifests have been read.

        The first missing one is asked for alone, so that waiting for it costs one request each time.

        Raises:
            OSError: the destination can't be reached.
        """
        count = 1
        with ThreadPoolExecutor(_READERS) as pool:
            while self._missing:
                ranks = self._missing[:count]
                manifests = list(pool.map(lambda rank: self._read_one(destination, rank), ranks))
                for rank, manifest in zip(ranks, manifests, strict=True):
                    if manifest is not None:
                        self.manifest = replace(self.manifest, files=self.manifest.files | manifest.files)
                        self._missing.remove(rank)
                if None in manifests:
                    return False
                count = _READERS
        return True

    def _read_one(self, destination: Store, rank: int) -> Manifest | None:
        try:
            manifest = Manifest.from_bytes(destination.read(rank_manifest_name(self.manifest.batch, rank)))
        except (FileNotFoundError, ValueError):
            return None
        # A rank manifest of this name may be from an earlier attempt.
        return manifest if manifest.run == self.manifest.run else None


class _Upload:
    """A checkpoint's upload, and what of it is done, so that a retry doesn't begin again."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.uploaded: set[str] = set()
        self.ranks = RankManifests(manifest)
        self.is_complete = False


def upload_files(
    manifest: Manifest, rank: int, local_folder: Path, destination: Store, uploaded: set[str] | None = None
) -> None:
    """Upload a rank's files, compare their sizes, and upload the rank's manifest.

    Args:
        manifest: the rank's manifest.
        rank: the rank.
        local_folder: folder that holds the files.
        destination: store that the run saves to.
        uploaded: names of files that earlier calls have uploaded; they are not uploaded again. Others are added.

    Raises:
        OSError: an upload failed or is incomplete.
    """
    uploaded = set() if uploaded is None else uploaded
    for name, (size, _) in manifest.files.items():
        if name in uploaded:
            continue
        destination.upload(local_folder / name, name)
        stored = destination.stat(name)
        if stored is None or stored.bytes != size:
            raise OSError(f"{name} arrived with {stored.bytes if stored else 0:,} bytes instead of {size:,}")
        uploaded.add(name)
    name = rank_manifest_name(manifest.batch, rank)
    if name not in uploaded:
        destination.write(name, manifest.to_bytes())
        uploaded.add(name)


def complete_checkpoint(ranks: RankManifests, destination: Store) -> bool:
    """Write the manifest of a checkpoint if all its ranks have uploaded their files.

    Returns:
        Whether the checkpoint is complete.

    Raises:
        OSError: the destination can't be reached.
    """
    if not ranks.read(destination):
        return False
    complete = replace(ranks.manifest, files=dict(sorted(ranks.manifest.files.items())))
    if complete.path in complete.files:
        stored = destination.stat(complete.path)
        files = {} if stored is None else {complete.path: stored}
    else:
        files = destination.list(complete.path)
    if not _all_present(complete, files):
        return False
    write_manifest(complete, destination)
    return True


def write_manifest(manifest: Manifest, destination: Store) -> None:
    """Write a checkpoint's manifest and delete the ranks' manifests."""
    destination.write(manifest.name, manifest.to_bytes())
    destination.remove(rank_manifest_name(manifest.batch, rank) for rank in range(manifest.run["writers"]))


def upload_pending(local_folder: Path, destination: Store, uploaded: int) -> int:
    """Upload checkpoint files that an earlier attempt wrote to the local folder but did not upload.

    Args:
        local_folder: this node's folder of checkpoints.
        destination: store that the run saves to.
        uploaded: batch of the newest complete checkpoint there; older ones are not uploaded.

    Returns:
        The number of ranks' parts that were uploaded.

    Raises:
        OSError: the destination can't be reached.
    """
    local, count = open_store(str(local_folder)), 0
    entries = local.entries()
    for name in _rank_manifests(entries):
        manifest = _read(local, name)
        if manifest is None or manifest.batch <= uploaded:
            continue
        if _all_present(manifest, files_beside(manifest, local, entries)):
            message = "checkpoint %s was not stored in %s when the last attempt ended; it is stored now"
            _log.warning(message, manifest.path, destination.root)
            upload_files(manifest, rank_of(name), local_folder, destination)
            count += 1
    return count


def write_missing_manifests(destination: Store, entries: Entries | None = None) -> int:
    """Write missing manifests of checkpoints that all ranks have uploaded.

    Args:
        destination: store that the run saves to.
        entries: its entries, if they have been listed already.

    Returns:
        The number of manifests that were written.

    Raises:
        OSError: the destination can't be reached.
    """
    entries, count = destination.entries() if entries is None else entries, 0
    for name in _rank_manifests(entries):
        # Rank 0's manifest tells how many ranks there are.
        first = _read(destination, name) if rank_of(name) == 0 else None
        if first is None:
            continue
        if all(rank_manifest_name(first.batch, rank) in entries for rank in range(first.run["writers"])):
            count += complete_checkpoint(RankManifests(first), destination)
    return count


def _rank_manifests(entries: Entries) -> list[str]:
    """Return the names of the ranks' manifests of checkpoints without a manifest."""
    return [
        name
        for name in entries
        if (batch := batch_of_rank_manifest(name)) is not None and manifest_name(batch) not in entries
    ]


def _read(folder: Store, name: str) -> Manifest | None:
    with suppress(ValueError):
        return Manifest.from_bytes(folder.read(name))
    return None


def _all_present(manifest: Manifest, files: Entries) -> bool:
    stored = ((files.get(name), size) for name, (size, _) in manifest.files.items())
    return all(file is not None and file.bytes == size for file, size in stored)
