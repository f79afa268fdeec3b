"""Read and write files in buckets, with the same methods as `LocalStore`."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from biphasic.storage.filesystems import ATTEMPTS, CONNECT_SECONDS, READ_SECONDS, endpoint, filesystem, region
from biphasic.storage.local import atomic_path
from biphasic.storage.paths import StoredFile


class _BucketStore(ABC):
    """Base class of bucket stores. `move` uploads a file from a temporary folder and deletes the local file."""

    @abstractmethod
    def upload(self, file: Path, name: str) -> None:
        """See `LocalStore`."""

    def move(self, file: Path, name: str) -> None:
        """See `LocalStore`."""
        self.upload(file, name)
        file.unlink()

    def scratch(self) -> Path:
        """See `LocalStore`."""
        return Path(tempfile.mkdtemp(prefix="biphasic-"))


class S3Store(_BucketStore):
    """A prefix in an S3 bucket. boto3 retries with backoff and jitter (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE)."""

    def __init__(self, root: str):
        import boto3
        from botocore.config import Config

        self.root = root.rstrip("/")
        self._bucket, _, self._prefix = self.root.removeprefix("s3://").partition("/")
        retries: dict[str, Any] = {"total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))}
        retries["mode"] = os.environ.get("AWS_RETRY_MODE", "standard")
        with _as_os_error():
            self._client: Any = boto3.client(
                "s3",
                endpoint_url=endpoint(),
                region_name=region() or ("us-east-1" if endpoint() else None),
                config=Config(retries=retries, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS),  # pyright: ignore[reportArgumentType]
            )

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `LocalStore`."""
        prefix = self._key(below).rstrip("/")
        files = {}
        with _as_os_error():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else ""
            )
            for page in pages:
                for item in page.get("Contents", []):
                    name = posixpath.relpath(item["Key"], self._prefix or ".")
                    if not item["Key"].endswith("/"):
                        files[name] = StoredFile(item["Size"], item["ETag"].strip('"'))
        return dict(sorted(files.items()))

    def stat(self, name: str) -> StoredFile | None:
        """See `LocalStore`."""
        try:
            with _as_os_error():
                head = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        except FileNotFoundError:
            return None
        return StoredFile(head["ContentLength"], head["ETag"].strip('"'))

    def read(self, name: str) -> bytes:
        """See `LocalStore`."""
        with _as_os_error():
            return self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        """See `LocalStore`."""
        with _as_os_error():
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def upload(self, file: Path, name: str) -> None:
        """See `LocalStore`."""
        with _as_os_error():
            self._client.upload_file(str(file), self._bucket, self._key(name))

    def download(self, name: str, file: Path) -> None:
        """See `LocalStore`."""
        with atomic_path(file) as partial, _as_os_error():
            self._client.download_file(self._bucket, self._key(name), str(partial))

    def remove(self, names: Iterable[str]) -> None:
        """See `LocalStore`."""
        with _as_os_error():
            for name in names:
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return posixpath.join(self._prefix, name)


class ArrowStore(_BucketStore):
    """A prefix in any other bucket, accessed through pyarrow or fsspec.

    No folders are made: buckets need none, and pyarrow would also make a bucket that does not exist.
    """

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        with _arrow_as_os_error():
            self._system, name = filesystem(self.root)
        self._prefix = name.rstrip("/")

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `LocalStore`."""
        from pyarrow.fs import FileSelector, FileType

        folder = posixpath.join(self._prefix, below).rstrip("/")
        with _arrow_as_os_error():
            infos = self._system.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True))
        files = {posixpath.relpath(info.path, self._prefix): info for info in infos if info.type == FileType.File}
        if not files:
            self._require_bucket()
        return {name: StoredFile(info.size, f"mtime:{info.mtime_ns}") for name, info in sorted(files.items())}

    def stat(self, name: str) -> StoredFile | None:
        """See `LocalStore`."""
        from pyarrow.fs import FileType

        with _arrow_as_os_error():
            [info] = self._system.get_file_info([posixpath.join(self._prefix, name)])
        return StoredFile(info.size, f"mtime:{info.mtime_ns}") if info.type == FileType.File else None

    def read(self, name: str) -> bytes:
        """See `LocalStore`."""
        with _arrow_as_os_error(), self._system.open_input_file(posixpath.join(self._prefix, name)) as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """See `LocalStore`. The object becomes visible when its stream is closed."""
        with _arrow_as_os_error(), self._system.open_output_stream(posixpath.join(self._prefix, name)) as file:
            file.write(content)

    def upload(self, file: Path, name: str) -> None:
        """See `LocalStore`."""
        path = posixpath.join(self._prefix, name)
        with file.open("rb") as source, _arrow_as_os_error(), self._system.open_output_stream(path) as target:
            shutil.copyfileobj(source, target, 1 << 22)

    def download(self, name: str, file: Path) -> None:
        """See `LocalStore`."""
        path = posixpath.join(self._prefix, name)
        with (
            atomic_path(file) as partial,
            _arrow_as_os_error(),
            self._system.open_input_stream(path) as source,
            partial.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 22)

    def remove(self, names: Iterable[str]) -> None:
        """See `LocalStore`."""
        for name in names:
            if self.stat(name) is not None:
                with _arrow_as_os_error():
                    self._system.delete_file(posixpath.join(self._prefix, name))

    def _require_bucket(self) -> None:
        """Refuse a bucket that does not exist, which pyarrow lists as if it were empty."""
        from pyarrow.fs import FileSelector

        scheme, _, path = self.root.partition("://")
        if scheme in ("gs", "az"):
            with _arrow_as_os_error():
                try:
                    self._system.get_file_info(FileSelector(path.partition("/")[0]))
                except FileNotFoundError as error:
                    raise FileNotFoundError(f"the bucket {path.partition('/')[0]} does not exist") from error


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert boto3's errors to OSErrors, which file operations on a disk raise too."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        missing = error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound")
        raise (FileNotFoundError if missing else OSError)(str(error)) from error
    except (Boto3Error, BotoCoreError) as error:
        raise OSError(str(error)) from error


@contextmanager
def _arrow_as_os_error() -> Iterator[None]:
    """Convert pyarrow's errors to OSErrors, and shorten those of Google's library, which repeat themselves."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException) as error:
        google = re.search(r"google::cloud::Status\((.*?)(?: error_info=|\)\.? ?Detail:|\)$)", str(error), re.DOTALL)
        if google is None and isinstance(error, OSError):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(google[1] if google is not None else str(error)) from error
