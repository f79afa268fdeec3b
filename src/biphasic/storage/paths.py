"""Helpers for local and remote paths, stored files, and JSON records."""

from __future__ import annotations

import glob
import json
import os
import posixpath
import re
import stat
from dataclasses import dataclass
from typing import Any

from biphasic.errors import UserError

PASSWORD = re.compile(r"(?<![A-Za-z0-9+.-])(?:oci://[^/\s@]*:|(?!oci://)[A-Za-z0-9+.-]+://)[^/\s]*@")
"""A URL with a user or a password, such as `s3://key:secret@bucket`. `oci://bucket@namespace/…` has neither."""
UNFINISHED_PREFIX = ".unfinished-"
"""Name prefix of files and folders that are still being written. `list` leaves them out."""


@dataclass(frozen=True)
class StoredFile:
    """A file's size in bytes, and its version: the ETag on S3, otherwise the modification time."""

    bytes: int
    version: str


class UnreachableError(OSError):
    """A bucket or the hub can't be reached or is overloaded. The same request may succeed later."""


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL, not a local path."""
    return "://" in path


def is_folder(path: str) -> bool:
    """Return whether there is a local folder. Raises a UserError if this user may not enter one of the folders above it."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None
    except (OSError, ValueError):
        return False


def glob_pattern(path: str) -> str:
    """Return a local path as a pattern for `glob`. The part that exists stands for itself, as in `text [2024]/*.txt`."""
    parts = path.split("/")
    ends = (end for end in range(len(parts), 0, -1) if os.path.exists("/".join(parts[:end])))
    existing = "/".join(parts[: next(ends, 0)])
    return glob.escape(existing) + path.removeprefix(existing)


def is_inside(name: str) -> bool:
    """Return whether a file name in a record stays in the record's folder: relative, without `..`."""
    return bool(name) and not posixpath.isabs(name) and ".." not in name.split("/") and "\0" not in name


def require_inside(name: str) -> str:
    """Return the name of a file below a folder. Raises an OSError if it leads out of the folder."""
    if name and not is_inside(name):
        raise OSError(f"{name!r} leads out of the folder")
    return name


def without_password(path: str) -> str:
    """Return `path`. If it is a URL with user and password, raises a UserError that doesn't show it."""
    if PASSWORD.search(path):
        scheme = path.partition("://")[0]
        raise UserError(
            f"{scheme}://…: expected an address without user and password: credentials come from the environment"
        )
    return path


def json_bytes(content: Any) -> bytes:
    """Encode a record as indented JSON in UTF-8."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
