"""Arrays that are made once and then mapped into memory, by content: what many fine-tunings of a machine share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.errors import UserError
from biphasic.storage import UNFINISHED, short

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one after another: row i is `flat[ends[i]:ends[i + 1]]`."""

    flat: np.ndarray
    ends: np.ndarray
    """int64 [rows + 1], from 0."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | np.ndarray], dtype: Any = np.int32) -> Ragged:
        """From lists of numbers, which may come one by one: as arrays they need a tenth of the memory."""
        parts = [np.asarray(row, dtype) for row in rows]
        ends = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=ends[1:])
        return cls(np.concatenate([np.empty(0, dtype), *parts]), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.ends[row] : self.ends[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]."""
        return np.diff(self.ends)


def pack(**rows: Ragged) -> Arrays:
    """Ragged rows as plain arrays, for `cached`."""
    return {f"{name}.{part}": getattr(one, part) for name, one in rows.items() for part in ("flat", "ends")}


def unpack(arrays: Arrays, name: str) -> Ragged:
    """What `pack` packed."""
    return Ragged(arrays[f"{name}.flat"], arrays[f"{name}.ends"])


def cached(folder: str, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
    """Arrays, made by the first process that asks; others wait for it.

    Args:
        folder: of this machine; what lies there may be removed whenever nothing runs.
        key: everything that decides the arrays, as JSON's types.
        make: makes them.

    Returns:
        By name, mapped and read-only.

    Raises:
        UserError: the folder can't be written to, or what `make` raises.
    """
    text = json.dumps(key, sort_keys=True)
    place = Path(folder) / "arrays" / hashlib.sha256(text.encode()).hexdigest()[:24]
    try:
        with locked(place):
            if not place.is_dir():
                _make(place, text, make())
        return {file.stem: _load(file) for file in sorted(place.glob("*.npy"))}
    except OSError as error:
        raise UserError(f"cache {folder}: can't be written and read ({short(error)})") from None


def _make(place: Path, text: str, arrays: Arrays) -> None:
    partial = place.with_name(f"{UNFINISHED}{place.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, array in arrays.items():
        np.save(partial / f"{name}.npy", array)
    (partial / "key.json").write_text(text + "\n", encoding="utf-8")
    partial.rename(place)


def _load(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except ValueError:  # an array without elements can't be mapped
        return np.load(file)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time; the lock goes with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
