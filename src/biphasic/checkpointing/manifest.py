"""What makes a checkpoint complete: a manifest, written last, that names its files with their sizes and hashes.

A run's folder, on disk or in a bucket, holds for the checkpoint of batch 1000

    ba1000-rank0.pt                 one file, or with FSDP a folder: ep0-ba1000/.metadata, ep0-ba1000/__0_0.distcp, …
    ba1000.rank3.json               while it is saved: what rank 3 has stored
    ba1000.json                     the manifest, which takes their place
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from biphasic.storage import Store, StoredFile, as_bytes, hash_of, short

_NAMES = re.compile(r"^(?:ep\d+-)?ba(\d+)(?:\.json$|\.rank\d+\.json$|-rank\d+\.pt$|/)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    `path` is what Composer loads, relative to the folder; `files` has for each file its size in bytes and its xxh64;
    `run` says what it is of: the run's name, tokens, phase.
    """

    batch: int
    path: str
    files: dict[str, tuple[int, str]]
    run: dict[str, Any]

    @property
    def name(self) -> str:
        """Its own file."""
        return f"ba{self.batch}.json"

    def as_bytes(self) -> bytes:
        """As it is stored."""
        return as_bytes(asdict(self))

    @staticmethod
    def of(content: bytes) -> Manifest:
        """From what is stored.

        Raises:
            ValueError: it is no manifest.
        """
        try:
            found = json.loads(content)
            files = {str(name): (int(size), str(hash_)) for name, (size, hash_) in found["files"].items()}
            return Manifest(int(found["batch"]), str(found["path"]), files, dict(found["run"]))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no manifest ({error})") from None


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder: its manifest, or why it can't be used."""

    batch: int
    manifest: Manifest | None
    fault: str | None = None


def checkpoints_in(place: Store) -> list[Found]:
    """All checkpoints of a folder, the newest first; sizes are compared, contents are not read.

    Raises:
        OSError: the folder can't be listed.
    """
    return list(_newest_first(place, place.list()))


def batch_of(name: str) -> int | None:
    """Of which checkpoint a file is, by its name; None: of none."""
    match = _NAMES.match(name)
    return None if match is None else int(match[1])


def _newest_first(place: Store, there: dict[str, StoredFile]) -> Iterator[Found]:
    """A manifest is read when it is asked for."""
    batches = {batch for name in there if (batch := batch_of(name)) is not None}
    for batch in sorted(batches, reverse=True):
        yield _look(place, there, batch)


def _look(place: Store, there: dict[str, StoredFile], batch: int) -> Found:
    name = f"ba{batch}.json"
    if name not in there:
        return Found(batch, None, f"it has no {name}, so it was not finished")
    try:
        manifest = Manifest.of(place.read(name))
    except (ValueError, OSError) as error:
        return Found(batch, None, f"{name} can't be read ({short(error)})")
    if manifest.batch != batch:
        return Found(batch, None, f"{name} is the manifest of batch {manifest.batch}")
    for file, (size, _) in manifest.files.items():
        if file not in there:
            return Found(batch, None, f"{file} is missing")
        if there[file].bytes != size:
            return Found(batch, None, f"{file} has {there[file].bytes:,} bytes instead of {size:,}")
    return Found(batch, manifest)


def newest(place: Store, folder: Path, foreign: Callable[[Manifest], str | None] = lambda _: None) -> Manifest | None:
    """The newest complete checkpoint, on this machine.

    Others are passed over with a warning that says why, down to the previous good one.

    Args:
        place: where the run saves.
        folder: where a checkpoint that lies elsewhere is brought to. A file that is there already is kept if it is the
            right one.
        foreign: says of a manifest why it is another run's.

    Returns:
        Its manifest; `folder / manifest.path` is what Composer loads. None when there is nothing to go on from.

    Raises:
        OSError: the place can't be listed.
    """
    for found in _newest_first(place, place.list()):
        fault = found.fault
        if found.manifest is not None:
            fault = foreign(found.manifest) or bring(found.manifest, place, folder)
            if fault is None:
                return found.manifest
        _log.warning("checkpoint ba%d in %s is passed over: %s", found.batch, place.root, fault)
    return None


def bring(manifest: Manifest, place: Store, folder: Path) -> str | None:
    """Have a checkpoint's files on this machine, each compared with its hash; returns what is wrong with them."""
    here = Path(place.root).resolve() == folder.resolve()
    for name, (size, hash_) in manifest.files.items():
        file = folder / name
        if file.is_file() and file.stat().st_size == size and hash_of(file) == hash_:
            continue
        if here:
            return f"{name} is damaged: its hash is not the manifest's"
        try:
            place.fetch(name, file)
        except OSError as error:
            return f"{name} can't be read ({short(error)})"
        if file.stat().st_size != size or hash_of(file) != hash_:
            file.unlink()
            return f"{name} is damaged: its hash is not the manifest's"
    return None


def forget(manifest: Manifest, place: Store) -> None:
    """Remove a checkpoint, its manifest first: what is half removed is no complete one."""
    place.remove([manifest.name])
    place.remove(manifest.files)


def outdated(place: Store, there: dict[str, StoredFile], keep: int) -> Iterator[Manifest]:
    """Of what is `there`, the complete checkpoints beyond the newest `keep`, less those that stay; none when `keep` is
    negative."""
    if keep >= 0:
        complete = [found.manifest for found in _newest_first(place, there) if found.manifest is not None]
        yield from (one for one in complete[keep:] if not one.run.get("kept"))


def orphans(there: dict[str, StoredFile], before: int) -> list[str]:
    """Files of checkpoints older than batch `before` that have no manifest: a dead attempt's, never to be finished."""
    return [
        name
        for name in there
        if (batch := batch_of(name)) is not None and batch < before and f"ba{batch}.json" not in there
    ]


def newest_batch(there: dict[str, StoredFile]) -> int:
    """Of the newest manifest; -1 when there is none."""
    return max(
        (batch for name in there if (batch := batch_of(name)) is not None and name == f"ba{batch}.json"), default=-1
    )


def rank_of(name: str) -> int:
    """Which rank wrote a checkpoint's file; what the run has once is the first one's."""
    match = re.search(r"__(\d+)_\d+\.distcp$|-rank(\d+)\.pt$|\.rank(\d+)\.json$", name)
    return 0 if match is None else int(next(number for number in match.groups() if number is not None))


def part_name(batch: int, rank: int) -> str:
    """What a rank has stored of a checkpoint that is not complete yet."""
    return f"ba{batch}.rank{rank}.json"


def part_of(name: str) -> int | None:
    """Of which checkpoint a file is a rank's part, by its name; None: it is no part."""
    return batch_of(name) if ".rank" in name and name.endswith(".json") else None
