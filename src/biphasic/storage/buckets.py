"""Files in buckets."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from biphasic.storage.filesystems import ATTEMPTS, CONNECT_SECONDS, READ_SECONDS, endpoint, filesystem, region
from biphasic.storage.local import unfinished
from biphasic.storage.place import StoredFile


class S3Store:
    """A prefix of an S3 bucket; retries with backoff and jitter are boto3's own (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE)."""

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
        self.put(file, name)
        file.unlink()

    def put(self, file: Path, name: str) -> None:
        """See `Store`."""
        with _as_os_error():
            self._client.upload_file(str(file), self._bucket, self._key(name))

    def fetch(self, name: str, file: Path) -> None:
        """See `Store`."""
        with unfinished(file) as partial, _as_os_error():
            self._client.download_file(self._bucket, self._key(name), str(partial))

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
        self.put(file, name)
        file.unlink()

    def put(self, file: Path, name: str) -> None:
        """See `Store`."""
        path = posixpath.join(self._prefix, name)
        self._system.create_dir(posixpath.dirname(path), recursive=True)
        with file.open("rb") as source, self._system.open_output_stream(path) as target:
            shutil.copyfileobj(source, target, 1 << 22)

    def fetch(self, name: str, file: Path) -> None:
        """See `Store`."""
        path = posixpath.join(self._prefix, name)
        with (
            unfinished(file) as partial,
            self._system.open_input_stream(path) as source,
            partial.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 22)

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
