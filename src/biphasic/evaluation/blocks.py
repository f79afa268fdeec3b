"""The cache of embeddings on disk, in blocks of documents, and what the ranks of an evaluation share."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from composer.utils import dist
from filelock import FileLock
from tqdm import tqdm

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.ranks import is_first_rank
from biphasic.storage import atomic_path, is_remote, user_errors

_log = logging.getLogger(__name__)
Value = TypeVar("Value")


def local_model(path: str, cache: Path) -> str:
    """Return the local path of a model for `load_encoder`; local rank 0 of each node downloads a bucket's checkpoint."""
    folder = cache / "models"
    if is_remote(path):
        folder /= hashlib.sha256(path.encode()).hexdigest()[:16]  # different runs have equal checkpoint names
    local = local_checkpoint(path, folder) if dist.get_local_rank() == 0 else ""
    dist.barrier()
    return from_first_rank(lambda: local)


def from_first_rank(make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 and return its result on all ranks."""
    values: list[Any] = [make() if is_first_rank() else None]
    dist.broadcast_object_list(values)
    return values[0]


def progress_bar(total: int, title: str) -> Any:
    """Return a bar of texts, which rank 0 shows after three seconds."""
    return tqdm(total=total, desc=title, unit="text", delay=3, disable=not is_first_rank())


def corpus_folder(cache: Path, limit: int, key: Mapping[str, Any], size: int) -> Path | None:
    """Return the folder for the `size` bytes of a corpus's embeddings, or None, with a warning, if there is no room.

    The least recently used embeddings are removed so that all in the folder `cache` have at most `limit` bytes and fit
    on the disk. Several evaluations may use it at the same time. `key` is everything that affects the embeddings, as
    JSON types. Raises a UserError if the folder can't be written to.
    """
    text, cache = json.dumps(key, sort_keys=True), cache / "embeddings"
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:24]
    with user_errors(f"cache {cache}: can't be written to"), FileLock(cache / "room.lock"):
        others = [entry for entry in cache.iterdir() if entry.is_dir() and entry != folder]
        sizes = {other: _bytes_in(other) for other in sorted(others, key=lambda other: other.stat().st_mtime)}
        room = min(limit, shutil.disk_usage(cache).free + sum(sizes.values()) + _bytes_in(folder))
        if size > room:
            _log.warning("cache %s: no room for %d bytes: an interrupted evaluation embeds them again", cache, size)
            return None
        while sum(sizes.values()) + size > room:
            oldest = next(iter(sizes))
            shutil.rmtree(oldest, ignore_errors=True)
            del sizes[oldest]
        folder.mkdir(exist_ok=True)
        (folder / "key.json").write_text(text + "\n", encoding="utf-8")
        os.utime(folder)
    return folder


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("[0-9]*.npy"))


def stored(file: Path | None, shape: tuple[int, int], make: Callable[[], tuple[np.ndarray, int]]) -> tuple[np.ndarray, int]:
    """Return the embeddings of this shape in a file, and how many of their texts were cut, which a file beside it has.

    If a file is missing or damaged, call `make` and store both there.
    """
    if file is None:
        return make()
    count = file.with_suffix(".cut")
    with suppress(OSError, ValueError, EOFError):
        if (array := np.load(file, mmap_mode="r")).shape == shape:
            return array, int(count.read_text())
    array, cut = make()
    # The evaluation doesn't need the files: the disk may be full.
    with suppress(OSError):
        with atomic_path(file) as partial, partial.open("wb") as opened:
            np.save(opened, array)
        with atomic_path(count) as partial:
            partial.write_text(str(cut))
    return array, cut
