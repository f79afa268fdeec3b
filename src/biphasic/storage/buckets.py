"""Read and write files in buckets, with the same methods as `LocalStore`."""

from __future__ import annotations

import functools
import os
import posixpath
import re
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from biphasic.errors import Unavailable, UserError, first_line
from biphasic.storage.filesystems import ATTEMPTS, CONNECT_SECONDS, READ_SECONDS, endpoint, filesystem, region
from biphasic.storage.local import atomic_path
from biphasic.storage.paths import StoredFile, UnreachableError, require_inside

_DELETIONS = 16
"""Number of objects that are deleted at the same time."""
_BUSY = (408, 429)
_BUSY_MESSAGE = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL)"
    r"|Azure Error: \[(ServerBusy|InternalError|OperationTimedOut|\].*(connect|timed out))"
)
"""The messages of Google's and Azure's libraries. Brackets without a code mean that no response arrived."""
_CONNECTIONS = 96
"""Connections of a client. Several threads use it, with ten connections for each large file."""


class _BucketStore(ABC):
    """Base class of bucket stores. `move` uploads a file from a temporary folder and deletes the local file."""

    _prefix: str

    @abstractmethod
    def upload(self, file: Path, name: str) -> None: ...

    def move(self, file: Path, name: str) -> None:
        self.upload(file, name)
        file.unlink()

    def scratch(self) -> Path:
        self.remove_unfinished()
        return Path(tempfile.mkdtemp(prefix=f"biphasic-{os.getpid()}-{socket.gethostname()}-"))

    def remove_unfinished(self) -> None:
        """Remove the `scratch` folders that this host's killed processes left, of any store."""
        name = re.compile(rf"biphasic-(\d+)-{re.escape(socket.gethostname())}-\w{{8}}")
        for folder in Path(tempfile.gettempdir()).iterdir():
            if (match := name.fullmatch(folder.name)) and not Path("/proc", match[1]).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _key(self, name: str) -> str:
        return posixpath.join(self._prefix, require_inside(name))


class S3Store(_BucketStore):
    """A prefix in an S3 bucket. boto3 retries with backoff and jitter (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE)."""

    def __init__(self, root: str):
        from botocore.config import Config

        self.root = root.rstrip("/")
        self._bucket, _, self._prefix = self.root.removeprefix("s3://").partition("/")
        self._attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))
        retries: dict[str, Any] = {"total_max_attempts": self._attempts}
        retries["mode"] = os.environ.get("AWS_RETRY_MODE", "standard")
        # boto3 would add checksums that other stores than Amazon's may not know, over HTTPS behind a content whose length
        # it doesn't send.
        required = "when_required" if endpoint() else None
        sent = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", required)
        checked = os.environ.get("AWS_RESPONSE_CHECKSUM_VALIDATION", required)
        with _as_os_error():
            self._client: Any = _session().client(
                "s3",
                endpoint_url=endpoint(),
                region_name=region(),
                config=Config(
                    retries=retries,
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    max_pool_connections=_CONNECTIONS,
                    request_checksum_calculation=sent,
                    response_checksum_validation=checked,
                ),  # pyright: ignore[reportArgumentType]
            )

    def list(self, below: str = "") -> dict[str, StoredFile]:
        prefix = self._key(below).rstrip("/")
        listing = self._client.get_paginator("list_objects_v2")
        pages = listing.paginate(Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else "")
        with _as_os_error():
            objects = [item for page in pages for item in page.get("Contents", [])]
        files = {
            posixpath.relpath(item["Key"], self._prefix or "."): StoredFile(item["Size"], item["ETag"].strip('"'))
            for item in objects
            if not item["Key"].endswith("/")
        }
        return dict(sorted(files.items()))

    def stat(self, name: str) -> StoredFile | None:
        try:
            with _as_os_error():
                head = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        except FileNotFoundError:
            return None
        return StoredFile(head["ContentLength"], head["ETag"].strip('"'))

    def read(self, name: str) -> bytes:
        """boto3 retries requests, but not a response that breaks off."""
        from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

        attempt = 1
        with _as_os_error():
            while True:
                body = self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"]
                try:
                    return body.read()
                except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
                    if attempt >= self._attempts:
                        raise
                    attempt += 1

    def write(self, name: str, content: bytes) -> None:
        with _as_os_error():
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def upload(self, file: Path, name: str) -> None:
        with _as_os_error():
            self._client.upload_file(str(file), self._bucket, self._key(name))

    def download(self, name: str, file: Path) -> None:
        with atomic_path(file) as partial, _as_os_error():
            self._client.download_file(self._bucket, self._key(name), str(partial))

    def remove(self, names: Iterable[str]) -> None:
        """Not by S3's request for many objects, which some stores lack, or answer with an error (no Content-MD5)."""

        def remove(key: str) -> None:
            with suppress(FileNotFoundError), _as_os_error():  # Google's S3 interface answers 404 for a missing object
                self._client.delete_object(Bucket=self._bucket, Key=key)

        with ThreadPoolExecutor(_DELETIONS) as pool:
            list(pool.map(remove, map(self._key, names)))


class ArrowStore(_BucketStore):
    """A prefix in any other bucket, accessed through pyarrow or fsspec.

    No folders are made: buckets need none, and pyarrow would also make a bucket that does not exist.
    """

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        with _as_os_error():
            self._system, name = filesystem(self.root)
        self._prefix = name.rstrip("/")

    def list(self, below: str = "") -> dict[str, StoredFile]:
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self._key(below).rstrip("/"), recursive=True, allow_not_found=True)
        with _as_os_error():
            infos = self._system.get_file_info(selector)
        files = {posixpath.relpath(info.path, self._prefix): info for info in infos if info.type == FileType.File}
        if not files:
            self._require_bucket()
        return {name: _described_file(info) for name, info in sorted(files.items())}

    def stat(self, name: str) -> StoredFile | None:
        from pyarrow.fs import FileType

        with _as_os_error():
            [info] = self._system.get_file_info([self._key(name)])
        return _described_file(info) if info.type == FileType.File else None

    def read(self, name: str) -> bytes:
        with _as_os_error(), self._system.open_input_file(self._key(name)) as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """The object becomes visible when its stream is closed."""
        with _as_os_error(), self._system.open_output_stream(self._key(name)) as file:
            file.write(content)

    def upload(self, file: Path, name: str) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        with _as_os_error():
            copy_files(str(file), self._key(name), LocalFileSystem(), self._system)

    def download(self, name: str, file: Path) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        with atomic_path(file) as partial, _as_os_error():
            copy_files(self._key(name), str(partial), self._system, LocalFileSystem())

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            if self.stat(name) is not None:
                with _as_os_error():
                    self._system.delete_file(self._key(name))

    def _require_bucket(self) -> None:
        """Refuse a bucket that does not exist, which pyarrow lists as if it were empty."""
        from pyarrow.fs import FileSelector

        scheme, _, path = self.root.partition("://")
        if scheme in ("gs", "az"):
            with _as_os_error():
                try:
                    self._system.get_file_info(FileSelector(path.partition("/")[0]))
                except FileNotFoundError as error:
                    raise FileNotFoundError(f"the bucket {path.partition('/')[0]} does not exist") from error


def _described_file(info: Any) -> StoredFile:
    return StoredFile(info.size, f"mtime:{info.mtime_ns}")


@functools.cache
def _session() -> Any:
    """Return this process's boto3 session, without dateutil's parser, which takes most of a long listing's time."""
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time)
    return boto3.Session(botocore_session=core)


def _time(text: Any) -> datetime:
    from botocore.utils import parse_timestamp

    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return parse_timestamp(text)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert boto3's and pyarrow's errors to OSErrors, and shorten those of Google's library, which repeat themselves."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException, ClientError, Boto3Error, BotoCoreError) as error:
        google = re.search(r"google::cloud::Status\((.*?)(?: error_info=|\)\.? ?Detail:|\)$)", str(error), re.DOTALL)
        message = str(error) if google is None else google[1]
        busy = _BUSY_MESSAGE.search(message) is not None or (not isinstance(error, OSError) and is_unreachable(error))
        if isinstance(error, OSError) and google is None and not busy:
            raise
        code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
        missing = isinstance(error, FileNotFoundError) or code in ("404", "NoSuchKey", "NotFound")
        raise (FileNotFoundError if missing else UnreachableError if busy else OSError)(message) from error


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether an operation failed because a bucket or the hub can't be reached or is overloaded.

    It may succeed later. The error's causes are examined too, also those that Azure's library keeps in an attribute.
    """
    from boto3.exceptions import RetriesExceededError
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as BotoConnectionError

    kinds = (UnreachableError, ConnectionError, TimeoutError, socket.gaierror, RetriesExceededError, HTTPClientError,
             IncompleteReadError, BotoConnectionError)  # fmt: skip
    while error is not None:
        if isinstance(error, kinds):
            return True
        if isinstance(error, ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return _is_busy(status) or error.response.get("Error", {}).get("Code") == "RequestTimeout"
        if _is_busy(getattr(getattr(error, "response", None), "status_code", 0)):  # of Google, Azure and the hub
            return True
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    return False


def _is_busy(status: int) -> bool:
    return status >= 500 or status in _BUSY


def user_error(message: str, error: BaseException | None) -> UserError:
    """Return the error to show after a failed operation: `Unavailable` if a bucket can't be reached for now."""
    return Unavailable(message) if is_unreachable(error) else UserError(message)


@contextmanager
def user_errors(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise the block's OSErrors, and errors of these kinds, as UserErrors: `message`, and the error's first line."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise user_error(f"{message} ({first_line(error)})", error) from error
