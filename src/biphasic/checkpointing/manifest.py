"""Read and write checkpoint manifests, and find complete checkpoints.

A manifest lists a checkpoint's files with their sizes and hashes. It is written last, so a checkpoint without one is
incomplete. For the checkpoint of batch 1000, a run's folder (on disk or in a bucket) contains

    ba1000-rank0.pt                 one file, or with FSDP a folder: ep0-ba1000/.metadata, ep0-ba1000/__0_0.distcp, …
    ba1000.rank3.json               the files that rank 3 has uploaded, while the checkpoint is incomplete
    ba1000.json                     the manifest, which replaces the ranks' manifests

If the run was stopped within the validation after batch 1000, the first name is `ba1000-validating-rank0.pt` or
`ep0-ba1000-validating/`. The next start repeats the validation and saves again, now with the losses, under the usual name.
The names differ so that one of the two checkpoints is complete at any time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from biphasic.storage import Store, StoredFile, file_hash, first_line, is_inside, json_bytes

_NAMES = re.compile(r"^(?:ep\d+-)?ba(\d+)(?:\.json$|\.rank\d+\.json$|(?:-validating)?(?:-rank\d+\.pt$|/))")
_RANKS = re.compile(r"__(\d+)_\d+\.distcp$|-rank(\d+)\.pt$|\.rank(\d+)\.json$")
_DOWNLOADS = 8
"""Number of files that are downloaded at the same time: a checkpoint of many ranks has many small files."""
_log = logging.getLogger(__name__)

Entries = Mapping[str, StoredFile | None]
"""The names in a folder, with or without those in its subfolders (`Store.list`, `Store.entries`)."""


class ForeignFileError(ValueError):
    """A manifest names a file that is not in its checkpoint, such as `../x`."""


@checked_dataclass(frozen=True)
class Manifest:
    """The files and metadata of a complete checkpoint, or of the part of it that one rank has written.

    Attributes:
        batch: number of batches trained so far.
        path: path that Composer loads, relative to the folder.
        files: size in bytes and xxh64 hash of each file, by name.
        run: the run's `name`, `attempt` and `config`, the hashes of its data's `indexes`, the keys that were `overridden`
            when it resumed, its `rows`, `tokens`, `epochs` and `phase`, when its `last_batch` began (batches, rows, tokens,
            epochs), whether the checkpoint is `kept`, and `writers`, the number of ranks that write files of this
            checkpoint.
    """

    batch: int
    path: str
    files: dict[str, tuple[int, str]]
    run: dict[str, Any]

    @property
    def name(self) -> str:
        """File name of the manifest."""
        return manifest_name(self.batch)

    @property
    def is_within_validation(self) -> bool:
        """Whether the run was stopped within the validation that follows the batch."""
        return "-validating" in self.path

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file (JSON)."""
        return json_bytes(asdict(self))

    @staticmethod
    def from_bytes(content: bytes) -> Manifest:
        """Parse the content of a manifest's file.

        Raises:
            ForeignFileError: it names a file that is not in its checkpoint, which must not be written or deleted.
            ValueError: it is not a manifest.
        """
        manifest = TypeAdapter(Manifest).validate_json(content)
        for name in (manifest.path, *manifest.files):
            # The path of a sharded checkpoint is a folder.
            batches = (batch_of(name), batch_of(f"{name}/") if name == manifest.path else None)
            if not is_inside(name) or manifest.batch not in batches:
                raise ForeignFileError(f"names {name!r}, which is not a file of its checkpoint")
        return manifest


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint found in a folder, with its manifest or the reason why it can't be used (`fault`)."""

    batch: int
    manifest: Manifest | None
    fault: str | None = None


def checkpoint_path(batch: int, epoch: int, sharded: bool, validating: bool) -> str:
    """Return the path of a checkpoint, relative to its folder: a file, or a folder if it is sharded."""
    name = f"ba{batch}-validating" if validating else f"ba{batch}"
    return f"ep{epoch}-{name}" if sharded else f"{name}-rank0.pt"


def manifest_name(batch: int) -> str:
    """Return the file name of a checkpoint's manifest."""
    return f"ba{batch}.json"


def rank_manifest_name(batch: int, rank: int) -> str:
    """Return the file name of the manifest that lists one rank's files."""
    return f"ba{batch}.rank{rank}.json"


def batch_of(name: str) -> int | None:
    """Return the batch of the checkpoint that a file belongs to, from the file's name; None for other files."""
    match = _NAMES.match(name)
    return None if match is None else int(match[1])


def batch_of_rank_manifest(name: str) -> int | None:
    """Return the batch that a rank's manifest belongs to; None for all other files."""
    return batch_of(name) if ".rank" in name and name.endswith(".json") else None


def rank_of(name: str) -> int:
    """Return the rank that writes a checkpoint file; 0 for files without a rank in their name."""
    match = _RANKS.search(name)
    return 0 if match is None else int(next(number for number in match.groups() if number is not None))


def list_checkpoints(folder: Store) -> list[StoredCheckpoint]:
    """List all checkpoints in a folder, newest first. File sizes are checked; hashes are not.

    Raises:
        OSError: the folder can't be listed.
    """
    # With the subfolders, whose files would otherwise be listed for each checkpoint.
    entries = folder.list()
    return [_inspect(folder, entries, batch) for batch in _batches(entries)]


def newest_first(folder: Store) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a folder like `list_checkpoints`, but read each one only when it is reached.

    Raises:
        OSError: the folder can't be listed, or a checkpoint can't be read. An older one must not take its place: the next
            attempt to read it may succeed.
    """
    yield from _newest_first(folder, folder.entries())


def newest_batch(files: Entries) -> int:
    """Return the batch of the newest manifest; -1 if there is none."""
    batches = (batch for name in files if (batch := batch_of(name)) is not None and name == manifest_name(batch))
    return max(batches, default=-1)


def _newest_first(folder: Store, entries: Entries) -> Iterator[StoredCheckpoint]:
    for batch in _batches(entries):
        yield _read(folder, entries, batch)


def _batches(entries: Entries) -> list[int]:
    """Return the batches of all checkpoints, newest first."""
    return sorted({batch for name in entries if (batch := batch_of(name)) is not None}, reverse=True)


def _inspect(folder: Store, entries: Entries, batch: int) -> StoredCheckpoint:
    try:
        return _read(folder, entries, batch)
    except OSError as error:
        return StoredCheckpoint(batch, None, first_line(error))


def _read(folder: Store, entries: Entries, batch: int) -> StoredCheckpoint:
    name = manifest_name(batch)
    if name not in entries:
        return StoredCheckpoint(batch, None, f"it has no {name}, so it was not finished")
    try:
        manifest = Manifest.from_bytes(folder.read(name))
    except ValueError as error:
        return StoredCheckpoint(batch, None, not_a_manifest_message(name, error))
    except FileNotFoundError:
        return StoredCheckpoint(batch, None, f"{name} is missing")
    except OSError as error:
        raise type(error)(f"{name} can't be read ({first_line(error)})") from error
    if manifest.batch != batch:
        return StoredCheckpoint(batch, None, f"{name} is the manifest of batch {manifest.batch}")
    try:
        files = files_beside(manifest, folder, entries)
    except OSError as error:
        raise type(error)(f"{manifest.path} can't be listed ({first_line(error)})") from error
    for file, (size, _) in manifest.files.items():
        stored = files.get(file)
        if stored is None:
            return StoredCheckpoint(batch, None, f"{file} is missing")
        if stored.bytes != size:
            return StoredCheckpoint(batch, None, f"{file} has {stored.bytes:,} bytes instead of {size:,}")
    return StoredCheckpoint(batch, manifest)


def files_beside(manifest: Manifest, folder: Store, entries: Entries) -> Entries:
    """Return a checkpoint's stored files: the folder's entries, or a list of its subfolder if it is sharded."""
    return entries if manifest.files.keys() <= entries.keys() else folder.list(manifest.path)


def not_a_manifest_message(name: str, error: ValueError) -> str:
    """Return the message about a file that `Manifest.from_bytes` has refused."""
    return f"{name} {error}" if isinstance(error, ForeignFileError) else f"{name} is not a manifest"


def newest_complete(
    source: Store,
    local_folder: Path,
    reject: Callable[[Manifest], str | None] = lambda _: None,
    entries: Entries | None = None,
) -> Manifest | None:
    """Find the newest complete checkpoint and download its files.

    Incomplete, damaged and rejected checkpoints are skipped with a warning that gives the reason.

    Args:
        source: store that the run saves to.
        local_folder: folder to download to. A file with the right hash is not downloaded again.
        reject: returns why a checkpoint must not be used, or None.
        entries: the source's entries, if they have been listed already.

    Returns:
        The manifest (Composer loads `local_folder / manifest.path`), or None if there is no such checkpoint.

    Raises:
        OSError: the source can't be listed, or a checkpoint can't be read or downloaded. It may be undamaged.
    """
    for checkpoint in _newest_first(source, source.entries() if entries is None else entries):
        fault = checkpoint.fault
        if checkpoint.manifest is not None:
            fault = reject(checkpoint.manifest) or download_files(checkpoint.manifest, source, local_folder)
            if fault is None:
                return checkpoint.manifest
        _log.warning("checkpoint ba%d in %s is skipped: %s", checkpoint.batch, source.root, fault)
    return None


def download_files(manifest: Manifest, source: Store, local_folder: Path) -> str | None:
    """Download a checkpoint's files unless they exist, and check their hashes.

    Returns:
        None, or a message that names the file that is damaged or missing.

    Raises:
        OSError: a file can't be read or written.
    """
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        for fault in pool.map(lambda name: _download(name, manifest, source, local_folder), manifest.files):
            if fault is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return fault
    return None


def _download(name: str, manifest: Manifest, source: Store, local_folder: Path) -> str | None:
    file, (size, hash_) = local_folder / name, manifest.files[name]
    if not file.parent.resolve().is_relative_to(local_folder.resolve()):
        return f"{name} would be outside {local_folder}: {file.parent} is a link"
    if file.is_file() and file.stat().st_size == size and file_hash(file) == hash_:
        return None
    if Path(source.root).resolve() == local_folder.resolve():
        return f"{name} is damaged: its hash is not the manifest's" if file.is_file() else f"{name} is missing"
    try:
        source.download(name, file)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        raise type(error)(f"{name} can't be copied to {local_folder} ({first_line(error)})") from error
    if file.stat().st_size != size or file_hash(file) != hash_:
        file.unlink()
        return f"{name} is damaged: its hash is not the manifest's"
    return None


def delete_checkpoint(manifest: Manifest, folder: Store) -> None:
    """Delete a checkpoint. The manifest is deleted first, so a partly deleted checkpoint counts as incomplete."""
    folder.remove([manifest.name])
    folder.remove(manifest.files)


def outdated_checkpoints(folder: Store, entries: Entries, keep: int, kept: dict[str, StoredFile]) -> Iterator[Manifest]:
    """Yield complete checkpoints older than the newest `keep`, except those marked as kept; none if `keep` < 0.

    Args:
        folder: store that the run saves to.
        entries: its entries.
        keep: number of newest checkpoints to keep.
        kept: manifests of checkpoints that are marked as kept, as far as earlier calls have read them, by name. Others are
            added, so that each is read once.
    """
    if keep < 0:
        return
    complete = 0
    for batch in _batches(entries):
        name = manifest_name(batch)
        stored = entries.get(name)
        if stored is not None and kept.get(name) == stored:
            complete += 1
            continue
        manifest = _inspect(folder, entries, batch).manifest
        if manifest is None:
            continue
        complete += 1
        if stored is not None and manifest.run.get("kept"):
            kept[name] = stored
        elif complete > keep:
            yield manifest


def abandoned_files(entries: Entries, newest: Manifest) -> list[str]:
    """Return files and folders without a manifest, left by an earlier attempt, of the newest or an older checkpoint."""
    return [
        name
        for name in entries
        if (batch := batch_of(name)) is not None
        and ((batch < newest.batch and manifest_name(batch) not in entries) or is_replaced(name, newest))
    ]


def is_replaced(name: str, manifest: Manifest) -> bool:
    """Return whether a file or folder belongs to another checkpoint of the manifest's batch, which this one replaces."""
    path = name.partition("/")[0]
    return batch_of(name) == manifest.batch and not name.endswith(".json") and path != manifest.path
