"""Read and write checkpoint manifests, and find complete checkpoints.

A manifest lists a checkpoint's files with their sizes and hashes. It is written last, so a checkpoint without one is
incomplete. For the checkpoint of batch 1000, a run's folder (on disk or in a bucket) contains

    ba1000-rank0.pt                 one file, or with FSDP a folder: ep0-ba1000/.metadata, ep0-ba1000/__0_0.distcp, …
    ba1000.rank3.json               the files that rank 3 has uploaded, while the checkpoint is incomplete
    ba1000.json                     the manifest, which replaces the ranks' manifests

If the run was stopped before or within the validation after batch 1000, the first name is `ba1000-validating-rank0.pt` or
`ep0-ba1000-validating/`. The next start validates and saves again, now with the losses, under the usual name.
The names differ so that one of the two checkpoints is complete at any time.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from biphasic.config.plan import remaining_checkpoints
from biphasic.durations import Duration, TrainingProgress
from biphasic.errors import first_line
from biphasic.grouping import mapped_ahead
from biphasic.storage import Store, StoredFile, file_hash, is_inside, json_bytes

_NAMES = re.compile(r"^(?:ep\d+-)?ba(\d+)(?:\.json$|\.rank\d+\.json$|(?:-validating)?(?:-rank\d+\.pt$|/))")
_RANKS = re.compile(r"(?:__|[-.]rank)(\d+)(?:_\d+\.distcp|\.pt|\.json)$")
_READS, _DOWNLOADS = 16, 8
"""Number of manifests that are read at the same time, and of files: a checkpoint of many ranks has many small files."""
_log = logging.getLogger(__name__)

Entries = Mapping[str, StoredFile]
"""The files in a folder and its subfolders, by name (`Store.list`)."""


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
            checkpoint. A mean of checkpoints lists them as `merged`.
    """

    batch: int
    path: str
    files: dict[str, tuple[int, str]]
    run: dict[str, Any]

    @property
    def name(self) -> str:
        return manifest_name(self.batch)

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.files.values())

    @property
    def progress(self) -> TrainingProgress:
        """The batches, rows, tokens and epochs trained so far."""
        return TrainingProgress(self.batch, *(self.run[name] for name in ("rows", "tokens", "epochs")))

    @property
    def last_batch(self) -> TrainingProgress:
        """The batches, rows, tokens and epochs trained when the checkpoint's last batch began."""
        return TrainingProgress(*self.run["last_batch"])

    @property
    def sha256(self) -> str:
        """Hash of the manifest's file, and so of the checkpoint."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def is_first_at(self, time: Duration) -> bool:
        """Return whether no earlier batch of the run had reached a time that this checkpoint has."""
        return self.progress.reached(time) and not self.last_batch.reached(time)

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file (JSON)."""
        return json_bytes(asdict(self))


Known = dict[tuple[str, StoredFile], Manifest]
"""Manifests that were read, by name and version, so that they are not read again."""


def read_manifest(folder: Store, name: str) -> Manifest:
    """Read the manifest of a checkpoint or of a rank's part.

    Raises an OSError if it can't be read, and a ValueError if it is not that manifest, or names a file outside its
    checkpoint, which must not be written or deleted.
    """
    content = folder.read(name)
    try:
        manifest = TypeAdapter(Manifest).validate_json(content)
    except ValueError:
        raise ValueError(f"{name} is not a manifest") from None
    if manifest.batch != batch_of(name):
        raise ValueError(f"{name} is the manifest of batch {manifest.batch}")
    for file in (manifest.path, *manifest.files):
        # The path of a sharded checkpoint is a folder.
        batches = (batch_of(file), batch_of(f"{file}/") if file == manifest.path else None)
        if not is_inside(file) or manifest.batch not in batches:
            raise ValueError(f"{name} names {file!r}, which is not a file of its checkpoint")
    return manifest


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint found in a folder, with its manifest or the reason why it can't be used (`fault`)."""

    batch: int
    manifest: Manifest | None
    fault: str | None = None
    error: OSError | None = None
    """The error that prevented reading the checkpoint, which may be undamaged."""


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


def rank_of(name: str) -> int:
    """Return the rank that writes a checkpoint file; 0 for files without a rank in their name."""
    match = _RANKS.search(name)
    return 0 if match is None else int(match[1])


def batches_of(entries: Entries) -> list[int]:
    """Return the batches of all checkpoints, including incomplete ones, newest first."""
    return sorted({batch for name in entries if (batch := batch_of(name)) is not None}, reverse=True)


def manifest_batches(entries: Entries) -> list[int]:
    """Return the batches of the checkpoints that have a manifest, newest first."""
    return [batch for batch in batches_of(entries) if manifest_name(batch) in entries]


def list_checkpoints(folder: Store, entries: Entries | None = None, known: Known | None = None) -> list[StoredCheckpoint]:
    """List all checkpoints in a folder, newest first. The sizes of their files are checked; hashes are not.

    `entries` are the folder's, if they have been listed already. `known` remembers the manifests for a later call.
    """
    entries, known = folder.list() if entries is None else entries, {} if known is None else known
    for outdated in known.keys() - entries.items():
        del known[outdated]
    return list(mapped_ahead(lambda batch: _inspect(folder, entries, batch, known), batches_of(entries), _READS))


def newest_first(folder: Store, entries: Entries | None = None, known: Known | None = None) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a folder like `list_checkpoints`, but without `known` read each only when it is reached.

    Raises an OSError if the folder can't be listed, or a checkpoint can't be read. An older one must not take its place: the
    next attempt to read it may succeed.
    """
    entries = folder.list() if entries is None else entries
    lazily = (_inspect(folder, entries, batch, {}) for batch in batches_of(entries))
    for checkpoint in lazily if known is None else list_checkpoints(folder, entries, known):
        if checkpoint.error is not None:
            raise type(checkpoint.error)(checkpoint.fault) from checkpoint.error
        yield checkpoint


def _inspect(folder: Store, entries: Entries, batch: int, known: Known) -> StoredCheckpoint:
    name = manifest_name(batch)
    if name not in entries:
        return StoredCheckpoint(batch, None, f"it has no {name}, so it was not finished")
    try:
        version = name, entries[name]
        manifest = known[version] = known.get(version) or read_manifest(folder, name)
        fault = file_fault(manifest, entries)
    except ValueError as error:
        return StoredCheckpoint(batch, None, str(error))
    except FileNotFoundError:
        return StoredCheckpoint(batch, None, f"{name} is missing")
    except OSError as error:
        return StoredCheckpoint(batch, None, f"{name} can't be read ({first_line(error)})", error)
    return StoredCheckpoint(batch, None if fault else manifest, fault)


def file_fault(manifest: Manifest, entries: Entries) -> str | None:
    """Return a message about a file of a checkpoint that is missing in its folder or has another size, or None."""
    for file, (size, _) in manifest.files.items():
        stored = entries.get(file)
        if stored is None:
            return f"{file} is missing"
        if stored.bytes != size:
            return f"{file} has {stored.bytes:,} bytes instead of {size:,}"
    return None


def newest_complete(
    source: Store, local_folder: Path, checkpoints: Iterable[StoredCheckpoint] | None = None
) -> Manifest | None:
    """Find the newest complete checkpoint of a run's folder, and download its files to `local_folder`.

    Incomplete and damaged checkpoints are skipped with a warning. `checkpoints` are those to choose from, newest first
    (by default all). Raises an OSError if the source or a checkpoint, which may be undamaged, can't be read.
    """
    for checkpoint in newest_first(source) if checkpoints is None else checkpoints:
        fault = checkpoint.fault
        if checkpoint.manifest is not None:
            try:
                download_files(checkpoint.manifest, source, local_folder)
                return checkpoint.manifest
            except ValueError as error:
                fault = str(error)
        _log.warning("checkpoint ba%d in %s is skipped: %s", checkpoint.batch, source.root, fault)
    return None


def download_files(manifest: Manifest, source: Store, local_folder: Path) -> None:
    """Download a checkpoint's files unless they exist. Raises a ValueError if one is missing or damaged, or an OSError."""
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(pool.map(lambda name: _download(name, manifest, source, local_folder), manifest.files))


def _download(name: str, manifest: Manifest, source: Store, local_folder: Path) -> None:
    file = local_folder / name

    def is_intact() -> bool:
        size, hash_ = manifest.files[name]
        return file.is_file() and file.stat().st_size == size and file_hash(file) == hash_

    if not file.parent.resolve().is_relative_to(local_folder.resolve()):
        raise ValueError(f"{name} would be outside {local_folder}: {file.parent} is a link")
    if is_intact():
        return
    if Path(source.root).resolve() == local_folder.resolve():
        raise ValueError(f"{name} is damaged: its hash is not the manifest's" if file.is_file() else f"{name} is missing")
    try:
        source.download(name, file)
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    except OSError as error:
        raise type(error)(f"{name} can't be copied to {local_folder} ({first_line(error)})") from error
    if not is_intact():
        file.unlink()
        raise ValueError(f"{name} is damaged: its hash is not the manifest's")


def outdated_checkpoints(
    folder: Store, entries: Entries, keep: int, known: Known, branch_points: Sequence[Duration] = ()
) -> set[int]:
    """Return the batches of the complete checkpoints that the run deletes: all but the newest `keep` and the kept ones.

    A negative `keep` keeps all. A checkpoint is kept if its manifest says so, or if it is the first one at one of
    `branch_points`, which may be newer than the checkpoint. `known` remembers the manifests for a later call.
    """
    checkpoints = list_checkpoints(folder, entries, known) if keep >= 0 else ()
    complete = {each.batch: each.manifest for each in checkpoints if each.manifest}
    marked = {batch for batch, each in complete.items() if each.run.get("kept") or any(map(each.is_first_at, branch_points))}
    return set(complete).difference(remaining_checkpoints(sorted(complete), marked, keep))


def is_replaced(name: str, manifest: Manifest) -> bool:
    """Return whether a file or folder belongs to another checkpoint of the manifest's batch, which this one replaces."""
    path = name.partition("/")[0]
    return batch_of(name) == manifest.batch and not name.endswith(".json") and path != manifest.path
