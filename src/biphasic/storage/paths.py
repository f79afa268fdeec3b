"""Helpers for local and remote paths, stored files, and JSON records."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any

UNFINISHED_PREFIX = ".unfinished-"
"""Name prefix of files and folders that are still being written. `list` leaves them out."""


@dataclass(frozen=True)
class StoredFile:
    """A file's size in bytes, and its version: the ETag on S3, otherwise the modification time."""

    bytes: int
    version: str


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL, not a local path."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """Join a local or remote folder and a name."""
    return posixpath.join(folder, name)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def json_bytes(content: Any) -> bytes:
    """Encode a record as indented JSON in UTF-8."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
