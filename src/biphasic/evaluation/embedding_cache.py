"""Embeddings on disk, by model and corpus: what an interrupted evaluation goes on from, within a limit."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.errors import UserError
from biphasic.data.array_cache import locked
from biphasic.storage import UNFINISHED, short


class Blocks:
    """One corpus's embeddings, in files of a block each; a file that is there is whole."""

    def __init__(self, folder: Path, room: int):
        self._folder, self._room = folder, room
        self.refused = 0
        """Blocks that were not kept, for want of room."""

    def get(self, block: int) -> np.ndarray | None:
        """fp32 [documents, width], or None when it isn't there or can't be read."""
        try:
            return np.load(self._file(block), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None

    def put(self, block: int, embeddings: np.ndarray) -> None:
        """Keep a block, where there is room for it."""
        if embeddings.nbytes * (block + 1) > self._room:
            self.refused += 1
            return
        # Two evaluations may make the same block at the same time.
        partial = self._folder / f"{UNFINISHED}{os.getpid()}-{block:06d}.npy"
        try:
            with partial.open("wb") as file:
                np.save(file, embeddings)
            partial.replace(self._file(block))
        except OSError:  # the disk is full: the evaluation itself needs none of this
            partial.unlink(missing_ok=True)
            self.refused += 1

    def _file(self, block: int) -> Path:
        return self._folder / f"{block:06d}.npy"


class EmbeddingCache:
    """A folder of this machine in which evaluations keep embeddings; several may use it at the same time.

    Args:
        folder: where.
        limit: bytes that all of them may take.
    """

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder / "embeddings", limit

    @contextmanager
    def blocks(self, key: Mapping[str, Any], needed: int) -> Iterator[Blocks]:
        """The blocks of one corpus, which stay while they are used.

        Args:
            key: everything that decides the embeddings, as JSON's types.
            needed: bytes that all blocks take. What was not used for longest makes room for them.

        Raises:
            UserError: the folder can't be written to.
        """
        text = json.dumps(key, sort_keys=True)
        place = self._folder / hashlib.sha256(text.encode()).hexdigest()[:24]
        with ExitStack() as stack:
            try:
                # Others remove under this lock, too: never between a folder's making and its being held.
                with locked(self._folder / "room"):
                    place.mkdir(exist_ok=True)
                    used = stack.enter_context((place / "key.json").open("a+"))
                    fcntl.flock(used, fcntl.LOCK_SH)
                    if not used.tell():
                        used.write(text + "\n")
                        used.flush()
                    os.utime(place)
                    room = self._make_room(place, needed)
            except OSError as error:
                raise UserError(f"cache {self._folder}: can't be written to ({short(error)})") from None
            yield Blocks(place, room)
            os.utime(place)

    def _make_room(self, place: Path, needed: int) -> int:
        """Bytes that `place` may take, after the removal of what was not used for longest."""
        others = sorted((one for one in self._folder.iterdir() if one.is_dir() and one != place), key=_last_used)
        taken = {one: _bytes_in(one) for one in others}
        free = shutil.disk_usage(self._folder).free + _bytes_in(place)
        for one in others:
            missing = max(sum(taken.values()) + needed - self._limit, needed - free)
            if missing <= 0:
                break
            if _remove(one):
                free += taken.pop(one)
        return max(min(self._limit - sum(taken.values()), free), 0)


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # another one's, being renamed
            continue
    return total


def _remove(folder: Path) -> bool:
    """Whether it could be: not while somebody uses it."""
    try:
        with (folder / "key.json").open("a+") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    return True
