"""Cache arrays on disk, under a hash, and memory-map them so that many trials on a node share them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from biphasic.storage import atomic_path, user_errors


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array. Row i is `flat[ends[i]:ends[i + 1]]`."""

    flat: np.ndarray
    ends: np.ndarray
    """int64 [rows + 1]; the first is 0."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | np.ndarray], dtype: Any = np.int32) -> Ragged:
        """Build from rows, which may come from a generator: arrays need a tenth of the memory of lists."""
        parts = [np.asarray(row, dtype) for row in rows]
        ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, dtype), *parts]), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.ends[row] : self.ends[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row, int64 [rows]."""
        return np.diff(self.ends)

    def concatenate(self, rows: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return the chosen rows, one after another, and the length of each."""
        chosen = [self[row] for row in rows]
        return np.concatenate(chosen), [len(row) for row in chosen]


def cached(folder: str, key: Mapping[str, Any], make: Callable[[], dict[str, Ragged]]) -> dict[str, Ragged]:
    """Return ragged arrays by name from the cache, memory-mapped and read-only.

    The first process that needs them calls `make`, and others wait for it. `key` is everything that determines the
    arrays, as JSON types. The folder may be deleted when no job is running. Raises a UserError if the folder can't be
    read or written, or `make` raises it.
    """
    text = json.dumps(key, sort_keys=True)
    entry = Path(folder) / "arrays" / hashlib.sha256(text.encode()).hexdigest()[:24]
    with user_errors(f"cache {folder}: can't be read or written"):
        with FileLock(f"{entry}.lock"):
            if not entry.is_dir():
                with atomic_path(entry) as partial:
                    partial.mkdir()
                    for name, rows in make().items():
                        np.save(partial / f"{name}.flat.npy", rows.flat)
                        np.save(partial / f"{name}.ends.npy", rows.ends)
                    (partial / "key.json").write_text(text + "\n", encoding="utf-8")
        names = [file.name.removesuffix(".ends.npy") for file in entry.glob("*.ends.npy")]
        load = functools.partial(np.load, mmap_mode="r")
        return {name: Ragged(load(entry / f"{name}.flat.npy"), load(entry / f"{name}.ends.npy")) for name in names}
