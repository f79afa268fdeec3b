"""Cache document embeddings on disk within a size limit, so that an interrupted evaluation can resume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from biphasic.storage import atomic_path, user_errors


class EmbeddingBlocks:
    """The cached embeddings of one corpus, in one file per block. Files are written atomically."""

    def __init__(self, folder: Path, available: int):
        self._folder, self._available = folder, available
        self.skipped_blocks = 0
        """Number of blocks that were not stored because the cache limit or the disk was full."""

    def read(self, block: int) -> np.ndarray | None:
        """Return a block's embeddings, fp32 [documents, width], or None if the block is missing or damaged."""
        try:
            return np.load(self._file(block), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None

    def write(self, block: int, embeddings: np.ndarray) -> None:
        """Store a block if enough bytes are available."""
        if embeddings.nbytes * (block + 1) > self._available:
            self.skipped_blocks += 1
            return
        try:
            with atomic_path(self._file(block)) as partial, partial.open("wb") as file:
                np.save(file, embeddings)
        except OSError:  # for example, the disk is full; the evaluation doesn't need the file
            self.skipped_blocks += 1

    def _file(self, block: int) -> Path:
        return self._folder / f"{block:06d}.npy"


class EmbeddingCache:
    """A local folder in which evaluations store at most `limit` bytes of embeddings; several may use it at the same time."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder / "embeddings", limit

    def open(self, key: Mapping[str, Any], size: int) -> EmbeddingBlocks:
        """Return the blocks of one corpus of `size` bytes, removing the least recently used corpora if necessary.

        `key` is everything that affects the embeddings, as JSON types.

        Raises:
            UserError: the folder can't be written to.
        """
        text = json.dumps(key, sort_keys=True)
        folder = self._folder / hashlib.sha256(text.encode()).hexdigest()[:24]
        with user_errors(f"cache {self._folder}: can't be written to"), FileLock(self._folder / "room.lock"):
            folder.mkdir(exist_ok=True)
            (folder / "key.json").write_text(text + "\n", encoding="utf-8")
            os.utime(folder)
            return EmbeddingBlocks(folder, self._make_room(folder, size))

    def _make_room(self, folder: Path, size: int) -> int:
        """Remove the least recently used embeddings if necessary, and return the bytes available for `folder`."""
        others = [other for other in self._folder.iterdir() if other.is_dir() and other != folder]
        sizes = {other: _bytes_in(other) for other in sorted(others, key=lambda other: other.stat().st_mtime)}
        free = shutil.disk_usage(self._folder).free + _bytes_in(folder)
        for other in list(sizes):
            if sum(sizes.values()) + size <= self._limit and size <= free:
                break
            shutil.rmtree(other, ignore_errors=True)
            free += sizes.pop(other)
        return max(min(self._limit - sum(sizes.values()), free), 0)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("[0-9]*.npy"))
