"""What a place for files can do, and paths."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

UNFINISHED = ".unfinished-"
"""How the names of files and folders begin that are not whole yet; `list` does not show them."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes, and what changes when the content does: a store's ETag, or else the time of the last change."""

    bytes: int
    version: str


class Store(Protocol):
    """A folder or a bucket's prefix. What it can't do is an OSError; names are relative, with `/`."""

    root: str

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """Every file in the folder `below` and its folders, by name from the root, sorted; empty when there is none."""
        ...

    def stat(self, name: str) -> StoredFile | None:
        """One file; None when there is none."""
        ...

    def read(self, name: str) -> bytes:
        """A whole file; FileNotFoundError when there is none."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Make a file that is whole or absent, in place of an old one."""
        ...

    def take(self, file: Path, name: str) -> None:
        """Move a file of `scratch` here; whole or absent."""
        ...

    def put(self, file: Path, name: str) -> None:
        """Copy a file of this machine here; whole or absent."""
        ...

    def fetch(self, name: str, file: Path) -> None:
        """Copy one to a file of this machine, which is whole or absent; FileNotFoundError when there is none."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that isn't there is no error."""
        ...

    def scratch(self) -> Path:
        """A new empty local folder for files that `take` will move."""
        ...


def is_remote(path: str) -> bool:
    """Whether `path` names something in a bucket."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """`name` inside `folder`, either kind."""
    return posixpath.join(folder, name)


def short(error: BaseException) -> str:
    """The first line of what went wrong."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def as_bytes(content: Any) -> bytes:
    """JSON as every record is written."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
