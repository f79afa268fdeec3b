"""Read and write files in buckets: pyarrow's file systems, stores with the methods of `LocalStore`, and their errors."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from biphasic.errors import Unavailable, UserError, first_line
from biphasic.storage.files import (
    PASSWORD,
    StoredFile,
    UnreachableError,
    atomic_path,
    is_remote,
    require_inside,
    without_password,
)

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_ATTEMPTS, CONNECT_SECONDS, READ_SECONDS = 10, 10, 60
_GCS_RETRIES = timedelta(seconds=60)
"""Google's default is 15 minutes, during which a starting run would print nothing."""
_DELETIONS = 16
"""Number of objects that are deleted at the same time."""
_CONNECTIONS = 96
"""Connections of a client. Several threads use it, with ten connections for each large file."""
_LIBRARIES = ("azure", "boto3", "botocore", "pyarrow")
_BUSY_MESSAGE = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL)"
    r"|Azure Error: \[(ServerBusy|InternalError|OperationTimedOut|\].*(connect|timed out))"
)
"""The messages of Google's and Azure's libraries. Brackets without a code mean that no response arrived."""


def filesystem(path: str) -> tuple[FileSystem, str]:
    """Return the pyarrow file system for `path`, and the path within it.

    `s3://` uses the endpoint in S3_ENDPOINT_URL or AWS_ENDPOINT_URL, if set, and `gs://` the one in
    STORAGE_EMULATOR_HOST. `az://container/…` uses the account in AZURE_ACCOUNT_NAME (`azure_account`). `oci://` and
    `hf://` use fsspec. Raises a UserError if the URL's scheme is not supported, or its package is not installed.
    """
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    if not is_remote(path):
        return LocalFileSystem(), path
    scheme, _, name = without_password(path).partition("://")
    if scheme == "s3":
        return _s3(_endpoint(), name.partition("/")[0]), name
    if scheme == "gs":
        return _gcs(os.environ.get("STORAGE_EMULATOR_HOST")), name
    if scheme == "az":
        return _azure(azure_account()), name
    if scheme not in ("oci", "hf"):
        urls = "a local path, s3://, gs://, az://, oci:// or hf://"
        raise UserError(f"{path}: {scheme}:// is not supported; expected {urls}")
    import fsspec

    try:
        system = fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: {scheme}:// needs a package that is not installed ({first_line(error)})") from None
    return PyFileSystem(FSSpecHandler(system)), name


def _endpoint() -> str | None:
    """Return the URL of an S3 store other than Amazon's, from Streaming's or boto3's environment variable."""
    for variable in ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"):
        if url := os.environ.get(variable):
            expected = f"{variable}: expected an address"
            if PASSWORD.match(url):
                raise UserError(f"{expected} without user and password, which error messages would show")
            if not url.startswith(("http://", "https://")):
                raise UserError(f"{expected} that begins with http:// or https://")
            return url
    return None


def _region() -> str | None:
    """Return the region of S3 buckets from the environment. Stores other than Amazon's need one, but any will do."""
    default = "us-east-1" if _endpoint() else None
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or default


def _attempts() -> int:
    return int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))


def _s3_client(**settings: Any) -> Any:
    """Return boto3's client. It retries with backoff and jitter (AWS_MAX_ATTEMPTS, AWS_RETRY_MODE)."""
    mode = os.environ.get("AWS_RETRY_MODE", "standard")
    return _shared_client(os.getpid(), _endpoint(), _region(), _attempts(), mode, **settings)


@lru_cache
def _shared_client(process: int, endpoint: str | None, region: str | None, attempts: int, mode: str, **keys: Any) -> Any:
    """Return a client for these settings; making one takes ten milliseconds. Its connections are this process's alone."""
    from botocore.config import Config

    keys |= {"retries": {"total_max_attempts": attempts, "mode": mode}}
    config = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, **keys)
    return _session().client("s3", endpoint_url=endpoint, region_name=region, config=config)


@lru_cache
def _session() -> Any:
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    # Times stay text, since dateutil's parser would take most of a long listing's time.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return boto3.Session(botocore_session=core)


@lru_cache
def _s3(endpoint: str | None, bucket: str) -> FileSystem:
    """Return the file system of a bucket, with the proxy and the certificates that boto3 takes from the environment."""
    from botocore.httpsession import ProxyConfiguration
    from botocore.utils import get_environ_proxies
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    settings: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "request_timeout": READ_SECONDS}
    settings["retry_strategy"] = AwsStandardS3RetryStrategy(_attempts())
    if endpoint is None:
        settings["region"] = _bucket_region(bucket)
        url = f"https://{bucket}.s3.{settings['region']}.amazonaws.com"
    else:
        parts, url = urlsplit(endpoint), endpoint
        # Without a region, pyarrow would ask AWS for the bucket's region.
        settings |= {"region": _region(), "endpoint_override": parts.netloc + parts.path, "scheme": parts.scheme}
    if proxy := ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url):
        settings["proxy_options"] = proxy
    if certificates := os.environ.get("AWS_CA_BUNDLE"):
        settings["tls_ca_file_path"] = certificates
    return S3FileSystem(**settings)


def _bucket_region(bucket: str) -> str | None:
    """Return the region of an Amazon bucket, which Amazon names to anyone: pyarrow doesn't follow a redirect to it."""
    from botocore import UNSIGNED
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = _s3_client(signature_version=UNSIGNED).head_bucket(Bucket=bucket)
    except ClientError as error:
        answer: Any = error.response
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region") or _region()


@lru_cache
def _gcs(emulator: str | None) -> FileSystem:
    from pyarrow.fs import GcsFileSystem

    if emulator is None:
        return GcsFileSystem(retry_time_limit=_GCS_RETRIES)
    # Google's clients for other languages expect the variable without a scheme.
    parts = urlsplit(emulator if "://" in emulator else f"http://{emulator}")
    return GcsFileSystem(anonymous=True, scheme=parts.scheme, endpoint_override=parts.netloc, retry_time_limit=_GCS_RETRIES)


@dataclass(frozen=True)
class AzureAccount:
    """A storage account: its name, the URL of its blobs, and its key (None: the SDK's default credential chain)."""

    name: str
    url: str
    key: str | None = field(repr=False)


def azure_account() -> AzureAccount:
    """Return the storage account of `az://` from Streaming's AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY.

    The Azure CLI's AZURE_STORAGE_SERVICE_ENDPOINT is the URL of an account in another cloud, behind a private endpoint or
    in an emulator. Raises a UserError without AZURE_ACCOUNT_NAME.
    """
    name = os.environ.get("AZURE_ACCOUNT_NAME")
    if name is None:
        raise UserError("az://: AZURE_ACCOUNT_NAME is not set in the environment")
    url = os.environ.get("AZURE_STORAGE_SERVICE_ENDPOINT") or f"https://{name}.blob.core.windows.net"
    return AzureAccount(name, url.rstrip("/"), os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"))


@lru_cache
def _azure(account: AzureAccount) -> FileSystem:
    from pyarrow.fs import AzureFileSystem

    parts = urlsplit(account.url)
    # `account.blob.core.windows.net`: pyarrow puts the account's name before an authority that begins with a dot.
    # Otherwise the account is the first part of the path, which pyarrow adds too.
    authority = parts.netloc.removeprefix(account.name) if parts.netloc.startswith(f"{account.name}.") else parts.netloc
    return AzureFileSystem(
        account_name=account.name,
        account_key=account.key,
        blob_storage_authority=authority,
        blob_storage_scheme=parts.scheme,
        dfs_storage_authority=authority.replace(".blob.", ".dfs.", 1),
        dfs_storage_scheme=parts.scheme,
    )


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert the libraries' errors to OSErrors, and shorten those of Google's, which repeat themselves."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        google = re.search(r"google::cloud::Status\((.*?)(?: error_info=|\)\.? ?Detail:|\)$)", str(error), re.DOTALL)
        message = str(error) if google is None else google[1]
        busy = _BUSY_MESSAGE.search(message) is not None or (not isinstance(error, OSError) and is_unreachable(error))
        if isinstance(error, OSError) and google is None and not busy:
            raise
        response, azure_status = getattr(error, "response", None), getattr(error, "status_code", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else azure_status
        missing = isinstance(error, FileNotFoundError) or code in (404, "404", "NoSuchKey", "NotFound")
        raise (FileNotFoundError if missing else UnreachableError if busy else OSError)(message) from error


class _BucketStore:
    _prefix: str

    def upload(self, file: Path, name: str) -> None:
        raise NotImplementedError

    def move(self, file: Path, name: str) -> None:
        self.upload(file, name)
        file.unlink()

    def abort_uploads(self, is_own: Callable[[str], bool]) -> None:
        """Azure and Google remove them after a week."""

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
    """A prefix in an S3 bucket, accessed through boto3."""

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self._bucket, _, self._prefix = self.root.removeprefix("s3://").partition("/")
        # boto3 would add checksums that other stores than Amazon's may not know, over HTTPS behind a content whose length
        # it doesn't send.
        required = "when_required" if _endpoint() else None
        with as_os_error():
            self._client = _s3_client(
                max_pool_connections=_CONNECTIONS,
                request_checksum_calculation=os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", required),
                response_checksum_validation=os.environ.get("AWS_RESPONSE_CHECKSUM_VALIDATION", required),
            )

    @as_os_error()
    def list(self, below: str = "", keys_per_page: int = 1000) -> dict[str, StoredFile]:
        prefix = self._key(below).rstrip("/")
        listing, size = self._client.get_paginator("list_objects_v2"), {"PageSize": keys_per_page}
        pages = listing.paginate(Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else "", PaginationConfig=size)
        files = {
            posixpath.relpath(item["Key"], self._prefix or "."): StoredFile(item["Size"], item["ETag"].strip('"'))
            for page in pages
            for item in page.get("Contents", [])
            if not item["Key"].endswith("/")
        }
        return dict(sorted(files.items()))

    def stat(self, name: str) -> StoredFile | None:
        with suppress(FileNotFoundError), as_os_error():
            head = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
            return StoredFile(head["ContentLength"], head["ETag"].strip('"'))
        return None

    def read(self, name: str) -> bytes:
        return self.read_version(name)[0]

    @as_os_error()
    def read_version(self, name: str) -> tuple[bytes, str]:
        """Return a file's content and version with one request."""
        from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

        attempt = 1
        while True:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            try:
                return answer["Body"].read(), answer["ETag"].strip('"')
            # boto3 retries requests, but not a response that breaks off.
            except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
                if attempt >= _attempts():
                    raise
                attempt += 1

    @as_os_error()
    def write(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    @as_os_error()
    def upload(self, file: Path, name: str) -> None:
        self._client.upload_file(str(file), self._bucket, self._key(name))

    @as_os_error()
    def download(self, name: str, file: Path) -> None:
        with atomic_path(file) as partial:
            self._client.download_file(self._bucket, self._key(name), str(partial))

    def remove(self, names: Iterable[str]) -> None:
        """Not by S3's request for many objects, which some stores lack, or answer with an error (no Content-MD5)."""

        def remove(key: str) -> None:
            with suppress(FileNotFoundError), as_os_error():  # Google's S3 interface answers 404 for a missing object
                self._client.delete_object(Bucket=self._bucket, Key=key)

        with ThreadPoolExecutor(_DELETIONS) as pool:
            list(pool.map(remove, map(self._key, names)))

    def abort_uploads(self, is_own: Callable[[str], bool]) -> None:
        """Not every store lists these uploads, and not every user may; they then stay as they are."""
        with suppress(OSError), as_os_error():
            listing = self._client.get_paginator("list_multipart_uploads")
            for page in listing.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/" if self._prefix else ""):
                for item in page.get("Uploads", []):
                    if is_own(posixpath.relpath(item["Key"], self._prefix or ".")):
                        upload = {"Key": item["Key"], "UploadId": item["UploadId"]}
                        self._client.abort_multipart_upload(Bucket=self._bucket, **upload)


class ArrowStore(_BucketStore):
    """A prefix in any other bucket, accessed through pyarrow or fsspec.

    No folders are made: buckets need none, and pyarrow would also make a bucket that does not exist.
    """

    @as_os_error()
    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self._system, name = filesystem(self.root)
        self._prefix = name.rstrip("/")

    @as_os_error()
    def list(self, below: str = "") -> dict[str, StoredFile]:
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self._key(below).rstrip("/"), recursive=True, allow_not_found=True)
        infos = self._system.get_file_info(selector)
        files = {posixpath.relpath(info.path, self._prefix): info for info in infos if info.type == FileType.File}
        scheme, _, path = self.root.partition("://")
        if not files and scheme in ("gs", "az"):  # pyarrow lists a bucket that does not exist as if it were empty
            bucket = path.partition("/")[0]
            try:
                self._system.get_file_info(FileSelector(bucket))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"the bucket {bucket} does not exist") from error
        return {name: _described_file(info) for name, info in sorted(files.items())}

    @as_os_error()
    def stat(self, name: str) -> StoredFile | None:
        from pyarrow.fs import FileType

        [info] = self._system.get_file_info([self._key(name)])
        return _described_file(info) if info.type == FileType.File else None

    @as_os_error()
    def read(self, name: str) -> bytes:
        # `open_input_file` asks for the size first, and would read as much of a file that was replaced meanwhile.
        with self._system.open_input_stream(self._key(name), compression=None) as file:
            return file.read()

    def read_version(self, name: str) -> tuple[bytes, str]:
        content, file = self.read(name), self.stat(name)
        return content, "" if file is None else file.version

    @as_os_error()
    def write(self, name: str, content: bytes) -> None:
        """The object becomes visible when its stream is closed."""
        with self._system.open_output_stream(self._key(name)) as file:
            file.write(content)

    @as_os_error()
    def upload(self, file: Path, name: str) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        copy_files(str(file), self._key(name), LocalFileSystem(), self._system)

    @as_os_error()
    def download(self, name: str, file: Path) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        with atomic_path(file) as partial:
            copy_files(self._key(name), str(partial), self._system, LocalFileSystem())

    @as_os_error()
    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            if self.stat(name) is not None:
                self._system.delete_file(self._key(name))


def _described_file(info: Any) -> StoredFile:
    return StoredFile(info.size, f"mtime:{info.mtime_ns}")


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether an operation failed because a bucket or the hub can't be reached or is overloaded.

    It may succeed later. The error's causes are examined too, also those that Azure's library keeps in an attribute.
    """
    kinds: tuple[type[BaseException], ...] = (UnreachableError, ConnectionError, TimeoutError, socket.gaierror)
    if "boto3" in sys.modules:  # otherwise no error is boto3's, whose import takes 0.3 s
        from boto3.exceptions import RetriesExceededError
        from botocore.exceptions import ConnectionError as BotoConnectionError
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        kinds += (RetriesExceededError, HTTPClientError, IncompleteReadError, BotoConnectionError)
    while error is not None:
        if isinstance(error, kinds) or (status := _status(error)) >= 500 or status in (408, 429):
            return True
        if isinstance(response := getattr(error, "response", None), dict):
            return response.get("Error", {}).get("Code") == "RequestTimeout"
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    return False


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error of Amazon's, Google's, Azure's or the hub's library; 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return getattr(response, "status_code", 0)


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
