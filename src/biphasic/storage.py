"""Files in folders and in buckets, through one small interface: list, read, write whole, remove.

Paths are local, or `s3://…`, `gs://…`, `az://…`, `oci://…`, `hf://…`. Credentials come from each SDK's own chain (the
environment, its files, the machine's role) and from nowhere else. Reading by byte ranges goes through `filesystem`,
which is pyarrow's; S3 is written through boto3, since some stores refuse pyarrow's uploads (no Content-Length).
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from biphasic.config.errors import UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_ATTEMPTS = 10
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
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


def store(path: str) -> Store:
    """Where `path` lies.

    Raises:
        UserError: a kind of bucket that isn't known, or whose package isn't installed.
    """
    if not is_remote(path):
        return LocalStore(path)
    return S3Store(path) if path.startswith("s3://") else ArrowStore(path)


def filesystem(path: str) -> tuple[FileSystem, str]:
    """pyarrow's file system for `path`, and the name there, for reading parts of files.

    `s3://` uses the endpoint in S3_ENDPOINT_URL or AWS_ENDPOINT_URL, if one is set; `az://container/…` the account in
    AZURE_ACCOUNT_NAME. What pyarrow doesn't know goes through fsspec.

    Raises:
        UserError: a kind of bucket that isn't known, or whose package isn't installed.
    """
    from pyarrow.fs import FSSpecHandler, GcsFileSystem, LocalFileSystem, PyFileSystem

    if not is_remote(path):
        return LocalFileSystem(), path
    scheme, _, name = path.partition("://")
    if scheme == "s3":
        return _s3(_endpoint()), name
    if scheme in ("gs", "gcs"):
        return GcsFileSystem(), name
    if scheme == "az":
        return _azure(), name
    import fsspec

    try:
        system = fsspec.filesystem(scheme)
    except ValueError:
        kinds = "a local path, s3://, gs://, az://, oci:// or hf://"
        raise UserError(f"{path}: {scheme}:// is not known here; expected {kinds}") from None
    except ImportError as error:
        raise UserError(f"{path}: reading {scheme}:// needs a package that is not installed ({short(error)})") from None
    return PyFileSystem(FSSpecHandler(system)), name


def _endpoint() -> str | None:
    return os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


@lru_cache
def _s3(endpoint: str | None) -> FileSystem:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    settings: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "request_timeout": _READ_SECONDS,
        "retry_strategy": AwsStandardS3RetryStrategy(int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))),
    }
    if endpoint is None:
        return S3FileSystem(**settings)
    parts = urlsplit(endpoint)
    # Without a region pyarrow asks AWS where the bucket lies.
    region = _region() or "us-east-1"
    return S3FileSystem(endpoint_override=parts.netloc + parts.path, scheme=parts.scheme, region=region, **settings)


@lru_cache
def _azure() -> FileSystem:
    from pyarrow.fs import AzureFileSystem

    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if account is None:
        raise UserError("az://: AZURE_ACCOUNT_NAME is not set in the environment")
    return AzureFileSystem(account_name=account, account_key=os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"))


class LocalStore:
    """A folder of this machine (or one that many machines share)."""

    def __init__(self, root: str):
        self.root = root
        self._folder = Path(root)

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `Store`."""
        found = {}
        for folder, folders, files in os.walk(self._folder / below):
            folders[:] = sorted(name for name in folders if not name.startswith(UNFINISHED))
            for name in sorted(files):
                path = Path(folder) / name
                if not name.startswith(UNFINISHED) and path.is_file():
                    found[path.relative_to(self._folder).as_posix()] = _local(path)
        return dict(sorted(found.items()))

    def stat(self, name: str) -> StoredFile | None:
        """See `Store`."""
        path = self._folder / name
        return _local(path) if path.is_file() else None

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                # A temporary file is its owner's alone; this one is as open as any other that is made here.
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def take(self, file: Path, name: str) -> None:
        """See `Store`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as content:
            os.fsync(content.fileno())
        os.replace(file, path)

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`. Folders that this empties go too."""
        for name in names:
            path = self._folder / name
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self._folder or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def scratch(self) -> Path:
        """See `Store`. It lies in the folder itself, so that `take` is a rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._folder))

    def clear_unfinished(self) -> None:
        """Remove what killed processes left behind anywhere below."""
        for path in sorted(self._folder.rglob(f"{UNFINISHED}*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _local(path: Path) -> StoredFile:
    found = path.stat()
    return StoredFile(found.st_size, f"mtime:{found.st_mtime_ns}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class S3Store:
    """A prefix of an S3 bucket; retries with backoff and jitter are boto3's own (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE)."""

    def __init__(self, root: str):
        import boto3
        from botocore.config import Config

        self.root = root.rstrip("/")
        self._bucket, _, self._prefix = self.root.removeprefix("s3://").partition("/")
        retries: dict[str, Any] = {"total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))}
        retries["mode"] = os.environ.get("AWS_RETRY_MODE", "standard")
        with _as_os_error():
            self._client: Any = boto3.client(
                "s3",
                endpoint_url=_endpoint(),
                region_name=_region() or ("us-east-1" if _endpoint() else None),
                config=Config(retries=retries, connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS),  # pyright: ignore[reportArgumentType]
            )

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `Store`."""
        prefix = self._key(below).rstrip("/")
        found = {}
        with _as_os_error():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else ""
            )
            for page in pages:
                for item in page.get("Contents", []):
                    name = posixpath.relpath(item["Key"], self._prefix or ".")
                    if not item["Key"].endswith("/"):
                        found[name] = StoredFile(item["Size"], item["ETag"].strip('"'))
        return dict(sorted(found.items()))

    def stat(self, name: str) -> StoredFile | None:
        """See `Store`."""
        try:
            with _as_os_error():
                found = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        except FileNotFoundError:
            return None
        return StoredFile(found["ContentLength"], found["ETag"].strip('"'))

    def read(self, name: str) -> bytes:
        """See `Store`."""
        with _as_os_error():
            return self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        with _as_os_error():
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def take(self, file: Path, name: str) -> None:
        """See `Store`."""
        with _as_os_error():
            self._client.upload_file(str(file), self._bucket, self._key(name))
        file.unlink()

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`."""
        with _as_os_error():
            for name in names:
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def scratch(self) -> Path:
        """See `Store`."""
        return Path(tempfile.mkdtemp(prefix="biphasic-"))

    def _key(self, name: str) -> str:
        return posixpath.join(self._prefix, name)


class ArrowStore:
    """A prefix of any other bucket, through pyarrow or fsspec."""

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self._system, name = filesystem(self.root)
        self._prefix = name.rstrip("/")

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `Store`."""
        from pyarrow.fs import FileSelector, FileType

        place = posixpath.join(self._prefix, below).rstrip("/")
        infos = self._system.get_file_info(FileSelector(place, recursive=True, allow_not_found=True))
        found = {posixpath.relpath(info.path, self._prefix): info for info in infos if info.type == FileType.File}
        return {name: StoredFile(info.size, f"mtime:{info.mtime_ns}") for name, info in sorted(found.items())}

    def stat(self, name: str) -> StoredFile | None:
        """See `Store`."""
        from pyarrow.fs import FileType

        [info] = self._system.get_file_info([posixpath.join(self._prefix, name)])
        return StoredFile(info.size, f"mtime:{info.mtime_ns}") if info.type == FileType.File else None

    def read(self, name: str) -> bytes:
        """See `Store`."""
        with self._system.open_input_file(posixpath.join(self._prefix, name)) as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """See `Store`. An object appears when its stream is closed."""
        path = posixpath.join(self._prefix, name)
        self._system.create_dir(posixpath.dirname(path), recursive=True)
        with self._system.open_output_stream(path) as file:
            file.write(content)

    def take(self, file: Path, name: str) -> None:
        """See `Store`."""
        path = posixpath.join(self._prefix, name)
        self._system.create_dir(posixpath.dirname(path), recursive=True)
        with file.open("rb") as source, self._system.open_output_stream(path) as target:
            shutil.copyfileobj(source, target, 1 << 22)
        file.unlink()

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`."""
        for name in names:
            if self.stat(name) is not None:
                self._system.delete_file(posixpath.join(self._prefix, name))

    def scratch(self) -> Path:
        """See `Store`."""
        return Path(tempfile.mkdtemp(prefix="biphasic-"))


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What boto3 can't do is an OSError, as it is with a disk."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        missing = error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound")
        raise (FileNotFoundError if missing else OSError)(str(error)) from error
    except (Boto3Error, BotoCoreError) as error:
        raise OSError(str(error)) from error
