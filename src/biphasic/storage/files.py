"""Paths and URLs, JSON records, and files in local folders: read, atomically written and hashed."""

import functools
import glob
import hashlib
import json
import os
import posixpath
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from biphasic.errors import UserError

PASSWORD = re.compile(r"(?<![A-Za-z0-9+.-])(?:oci://[^/\s@]*:|(?!oci://)[A-Za-z0-9+.-]+://)[^/\s]*@")
"""A URL with a user or a password, such as `s3://key:secret@bucket`. `oci://bucket@namespace/…` has neither."""
UNFINISHED_PREFIX = ".unfinished-"
"""Name prefix of files and folders that are still being written. `list` leaves them out."""
_HIDDEN = re.compile(r"\.|_[^=]*$")
"""Names such as `.git` and Spark's `_temporary`, but not a partition's `_date=2024`."""
LOCK_FILE = f"{UNFINISHED_PREFIX}lock"
"""Name of a lock file in a store's folder. It is never listed or removed."""


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


def is_hidden(name: str, pattern: str) -> bool:
    """Return whether the path or pattern that found a file leaves it out: a part of the rest begins with `.` or `_`.

    A pattern reads such a file if its own part begins with the same character: `_a*` reads `_ab`, and `*` doesn't.
    """
    parts, named = name.split("/"), pattern.split("/")
    while parts and named and parts[0] == named[0]:
        del parts[0], named[0]
    hidden = filter(_HIDDEN.match, parts)
    return any(not any(part[0] == each[:1] and fnmatchcase(part, each) for each in named) for part in hidden)


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
        expected = "expected an address without user and password: credentials come from the environment"
        raise UserError(f"{path.partition('://')[0]}://…: {expected}")
    return path


def json_bytes(content: Any) -> bytes:
    """Encode a record as indented JSON in UTF-8."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


class LocalStore:
    """A local folder, or a folder that several nodes share.

    Bucket stores have the same methods. File names are relative to `root` and use `/`. Files are written atomically.
    Failed operations raise OSError; reading a file that does not exist raises FileNotFoundError. Names that lead out of
    `root` (`../x`, `/x`) are refused with an OSError: some come from records that others have written.
    """

    def __init__(self, root: str):
        self.root, self._folder = root, Path(root)

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """Return all files in the folder `below` and its subfolders, sorted by name. Names are relative to `root`.

        A folder that does not exist has no files. Links to folders are not followed.
        """
        listed = {}
        for folder, folders, files in os.walk(self._path(below), onerror=_raise_unless_missing):
            folders[:] = sorted(name for name in folders if not name.startswith(UNFINISHED_PREFIX))
            for name in sorted(files):
                path = Path(folder) / name
                if not name.startswith(UNFINISHED_PREFIX) and (file := _stat(path)) is not None:
                    listed[path.relative_to(self._folder).as_posix()] = file
        return dict(sorted(listed.items()))

    def stat(self, name: str) -> StoredFile | None:
        """Return a file's size and version, or None if it does not exist."""
        return _stat(f"{self._folder}/{require_inside(name)}")

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self._own_path(name)
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may remove the folder while it is empty.
            with suppress(FileNotFoundError), atomic_path(path) as partial:
                partial.write_bytes(content)
                _sync(partial)
                return

    def move(self, file: Path, name: str) -> None:
        """Move a file from a `scratch` folder into the store."""
        path = self._own_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        _sync(file)
        os.replace(file, path)

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file into the store. Nothing is copied if `file` is already the stored file."""
        path = self._own_path(name)
        if path.resolve() != file.resolve():
            _copy(file, path)

    def download(self, name: str, file: Path) -> None:
        """Copy a file from the store to a local file."""
        _copy(self._path(name), file)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that become empty. Files that do not exist are ignored."""
        for name in names:
            path = self._own_path(name)
            path.unlink(missing_ok=True)
            folders = path.relative_to(self._folder).parents
            with suppress(OSError):  # a folder is not empty, or another process has removed it
                for folder in [*folders][:-1]:
                    (self._folder / folder).rmdir()

    def abort_uploads(self, is_own: Callable[[str], bool]) -> None:
        """Free the space of uploads that killed processes left unfinished, of files that `is_own` knows by name.

        S3 keeps their parts, and charges for them, until they are aborted.
        """

    def scratch(self) -> Path:
        """Create an empty local folder for files to `move` into the store. Here, `move` is a rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=UNFINISHED_PREFIX, dir=self._folder))

    def remove_unfinished(self) -> None:
        """Remove unfinished files and folders that killed processes left."""
        for path in sorted(self._folder.rglob(f"{UNFINISHED_PREFIX}*")):
            if path.name != LOCK_FILE:
                _remove(path)

    def _path(self, name: str) -> Path:
        return self._folder / require_inside(name)

    def _own_path(self, name: str) -> Path:
        """Return the path of a file to write or remove, which no link may lead out of the folder."""
        path = self._path(name)
        if not path.parent.resolve().is_relative_to(self._folder.resolve()):
            raise OSError(f"{name!r} leads out of the folder, since {path.parent} is a link")
        return path


@functools.lru_cache(1024)
def _unfinished(folder: Path) -> list[str]:
    """Return the temporary files in a folder when this process first asks: listing it takes longer than a write."""
    return [name for name in os.listdir(folder) if name.startswith(UNFINISHED_PREFIX)]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, for a file or a folder that replaces `path` at the end.

    It is removed after an error. Its name contains the process and the host, because several may write the same file.
    Those that this host's killed processes left of this file are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = re.compile(rf"{UNFINISHED_PREFIX}(\d+)-{re.escape(f'{socket.gethostname()}-{path.name}')}")
    for other in _unfinished(path.parent.absolute()):
        if (match := name.fullmatch(other)) and not Path("/proc", match[1]).exists():
            _remove(path.with_name(other))
    partial = path.with_name(f"{UNFINISHED_PREFIX}{os.getpid()}-{socket.gethostname()}-{path.name}")
    # A link of this name, in a folder from elsewhere, would lead to a file outside.
    _remove(partial)
    try:
        yield partial
        if partial.is_dir() and path.exists():
            earlier = partial.with_name(f"{partial.name}.earlier")
            os.replace(path, earlier)
            os.replace(partial, path)
            _remove(earlier)
        else:
            os.replace(partial, path)
    finally:
        _remove(partial)


def is_free(folder: Path) -> bool:
    """Return whether a folder is missing or empty, so that `atomic_path` may replace it. A mount point is a UserError."""
    if os.path.ismount(folder.resolve()):
        problem = "is a mount point, which can't be replaced by a finished folder"
        raise UserError(f"{folder}: {problem}: name a folder in it")
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    with file.open("rb") as content:
        os.fsync(content.fileno())


def parquet_bytes(columns: Mapping[str, Any], rows_per_group: int | None = None) -> bytes:
    """Return columns, by name, as the content of a Parquet file with zstd compression."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(dict(columns)), sink, compression="zstd", row_group_size=rows_per_group)
    return sink.getvalue().to_pybytes()


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as partial:
        shutil.copyfile(source, partial)
        _sync(partial)


def file_hash(file: Path) -> str:
    """Return a file's xxh64 hash in hexadecimal."""
    import xxhash

    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh64).hexdigest()  # pyright: ignore[reportArgumentType]


def cached_file_hash(file: Path) -> str:
    """Return a file's xxh64 hash, cached in this process until the file's size or modification time changes."""
    status = file.stat()
    return _hash_of_version(file, status.st_size, status.st_mtime_ns)


@functools.cache
def _hash_of_version(file: Path, size: int, modified: int) -> str:
    return file_hash(file)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise type(error)(f"{error.filename} can't be listed ({error.strerror})") from error


def _stat(path: str | Path) -> StoredFile | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # another process may have removed it since it was listed
        return None
    return StoredFile(status.st_size, f"mtime:{status.st_mtime_ns}") if stat.S_ISREG(status.st_mode) else None
