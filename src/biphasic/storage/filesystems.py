"""pyarrow's file systems, for reading parts of files."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from biphasic.config.errors import UserError
from biphasic.storage.place import is_remote, short

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

ATTEMPTS = 10
CONNECT_SECONDS, READ_SECONDS = 10, 60


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
        return _s3(endpoint()), name
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


def endpoint() -> str | None:
    """Another S3 store than Amazon's, as Streaming names it, or boto3."""
    return os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")


def region() -> str | None:
    """Where the buckets lie."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


@lru_cache
def _s3(endpoint: str | None) -> FileSystem:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    settings: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "request_timeout": READ_SECONDS,
        "retry_strategy": AwsStandardS3RetryStrategy(int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))),
    }
    if endpoint is None:
        return S3FileSystem(**settings)
    parts = urlsplit(endpoint)
    # Without a region pyarrow asks AWS where the bucket lies.
    found = region() or "us-east-1"
    return S3FileSystem(endpoint_override=parts.netloc + parts.path, scheme=parts.scheme, region=found, **settings)


@lru_cache
def _azure() -> FileSystem:
    from pyarrow.fs import AzureFileSystem

    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if account is None:
        raise UserError("az://: AZURE_ACCOUNT_NAME is not set in the environment")
    return AzureFileSystem(account_name=account, account_key=os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"))
