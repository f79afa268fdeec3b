"""Files in folders and in buckets, and making an output appear whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from biphasic.config.errors import UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

RECORD = "conversion.json"
"""What a conversion says about itself; written last, so that its presence means that the output is whole."""
_STARTED = "conversion.started"
"""Lies in a bucket while a conversion writes there: what lies beside it may be thrown away."""
_UPLOADS = 8


def is_remote(path: str) -> bool:
    """Whether `path` names something in a bucket."""
    return "://" in path


def filesystem(path: str) -> tuple[FileSystem, str]:
    """Where `path` lies, and its name there.

    `s3://` uses the endpoint in S3_ENDPOINT_URL or AWS_ENDPOINT_URL, if one is set, and AWS's own credentials chain.

    Raises:
        UserError: a scheme other than s3.
    """
    from pyarrow.fs import LocalFileSystem

    if not is_remote(path):
        return LocalFileSystem(), path
    scheme, _, name = path.partition("://")
    if scheme != "s3":
        raise UserError(f"{path}: {scheme}:// can't be read here; expected a local path or s3://…")
    return _s3(_endpoint()), name


def _endpoint() -> str | None:
    return os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")


@lru_cache
def _s3(endpoint: str | None) -> FileSystem:
    from pyarrow.fs import S3FileSystem

    if endpoint is None:
        return S3FileSystem()
    parts = urlsplit(endpoint)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return S3FileSystem(endpoint_override=parts.netloc + parts.path, scheme=parts.scheme, region=region)


def join(folder: str, name: str) -> str:
    """`name` inside `folder`, either kind."""
    return posixpath.join(folder, name)


def files_below(folder: str) -> dict[str, int]:
    """Every file below `folder`: its name from there, and its bytes. Empty when there is no such folder.

    Raises:
        UserError: it can't be listed.
    """
    from pyarrow.fs import FileSelector, FileType

    system, name = filesystem(folder)
    name = name.rstrip("/")
    try:
        found = system.get_file_info(FileSelector(name, recursive=True, allow_not_found=True))
    except OSError as error:
        raise UserError(f"{folder}: can't be listed ({short(error)})") from None
    files = [info for info in found if info.type == FileType.File]
    return {posixpath.relpath(info.path, name): info.size for info in sorted(files, key=lambda info: info.path)}


def read_bytes(path: str) -> bytes:
    """A whole file.

    Raises:
        OSError: it isn't there or can't be read.
    """
    system, name = filesystem(path)
    with system.open_input_file(name) as file:
        return file.read()


def short(error: BaseException) -> str:
    """The first line of what went wrong."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class Destination(Protocol):
    """Where a conversion writes. Nothing that looks finished is there before `publish`."""

    folder: Path
    """Local folder to write files into."""

    def written(self, name: str) -> None:
        """The file `name` in `folder` is complete, and won't be read again."""
        ...

    def publish(self, record: dict[str, Any]) -> None:
        """Everything is written: make it appear, the record last."""
        ...

    def abandon(self) -> None:
        """Something went wrong: clear away what was written."""
        ...


def read_record(output: str) -> dict[str, Any] | None:
    """The record of the finished conversion at `output`; None when nothing is there, or only an unfinished one.

    Raises:
        UserError: `output` holds something else, or can't be read.
    """
    files = files_below(output)
    if RECORD in files:
        try:
            record = json.loads(read_bytes(join(output, RECORD)))
        except (OSError, ValueError) as error:
            raise UserError(f"{join(output, RECORD)}: can't be read ({short(error)})") from None
        listed = {f"{split}/{shard['file']}": shard["bytes"] for split, part in record["splits"].items()
                  for shard in part["shards"]}  # fmt: skip
        for name, size in listed.items():
            if files.get(name) != size:
                what = "is missing" if name not in files else f"has {files[name]} bytes instead of {size}"
                raise UserError(f"{output} is damaged: {name} {what}; remove the folder and convert again")
        return record
    if files and _STARTED not in files:
        raise UserError(
            f"output {output} already holds files that are no conversion (e.g. {min(files)}): choose another, or remove them"
        )
    return None


def destination(output: str) -> Destination:
    """A place to write a conversion to that will appear at `output`.

    Raises:
        UserError: it can't be written to, or another conversion is writing there.
    """
    try:
        return BucketDestination(output) if is_remote(output) else FolderDestination(Path(output))
    except OSError as error:
        raise UserError(f"output {output}: can't be written ({short(error)})") from None


class FolderDestination:
    """Writes to `<output>.partial`, which becomes `output` by one rename."""

    def __init__(self, output: Path):
        self.output = output
        self.folder = output.with_name(f"{output.name}.partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        # The lock goes with the process, however it ends, so what a killed conversion left is told from a live one.
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"output {output}: another conversion is writing it at this moment") from None
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def written(self, name: str) -> None:
        """Nothing to do: it appears with the others."""

    def publish(self, record: dict[str, Any]) -> None:
        """Write the record and rename the folder."""
        (self.folder / RECORD).write_text(_text(record), encoding="utf-8")
        self.folder.rename(self.output)
        os.close(self._lock)

    def abandon(self) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class BucketDestination:
    """Uploads each file as soon as it is complete, indexes after all shards, the record last."""

    def __init__(self, output: str):
        import boto3  # pyarrow's uploads have no Content-Length, which some stores insist on

        self.output = output.rstrip("/")
        self._bucket, _, self._prefix = filesystem(self.output)[1].partition("/")
        self._client = boto3.client("s3", endpoint_url=_endpoint())
        for name in sorted(files_below(self.output), key=lambda name: name == _STARTED):
            # `read_record` found no finished conversion, and the mark of an unfinished one.
            self._remove(name)
        self._put(_STARTED, b"{}")
        self.folder = Path(tempfile.mkdtemp(prefix="biphasic-convert-"))
        self._pool = ThreadPoolExecutor(_UPLOADS)
        self._uploads: list[Future[None]] = []

    def written(self, name: str) -> None:
        """Upload a file in the background and remove the local one; raises what an earlier upload ran into."""
        done = [upload for upload in self._uploads if upload.done()]
        self._uploads = [upload for upload in self._uploads if not upload.done()]
        for upload in done:
            upload.result()
        if Path(name).name != "index.json":
            self._uploads.append(self._pool.submit(self._upload, name))

    def publish(self, record: dict[str, Any]) -> None:
        """Wait for the shards, then upload the indexes, then the record."""
        for upload in self._uploads:
            upload.result()
        self._pool.shutdown()
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                self._upload(file.relative_to(self.folder).as_posix())
        self._put(RECORD, _text(record).encode())
        self._remove(_STARTED)
        shutil.rmtree(self.folder)

    def abandon(self) -> None:
        """Stop uploading. What is in the bucket has no record, and the next conversion to it starts by removing it."""
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _upload(self, name: str) -> None:
        file = self.folder / name
        with _as_os_error():
            self._client.upload_file(str(file), self._bucket, join(self._prefix, name))
        file.unlink()

    def _put(self, name: str, content: bytes) -> None:
        with _as_os_error():
            self._client.put_object(Bucket=self._bucket, Key=join(self._prefix, name), Body=content)

    def _remove(self, name: str) -> None:
        with _as_os_error():
            self._client.delete_object(Bucket=self._bucket, Key=join(self._prefix, name))


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What boto3 can't do is an OSError, as it is with a disk."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise OSError(str(error)) from error


def _text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
