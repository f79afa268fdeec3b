"""Open pyarrow file systems for local paths and bucket URLs, to read byte ranges of files."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from biphasic.errors import UserError
from biphasic.storage.paths import PASSWORD, first_line, is_remote, without_password

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

ATTEMPTS = 10
CONNECT_SECONDS, READ_SECONDS = 10, 60


def filesystem(path: str) -> tuple[FileSystem, str]:
    """Return the pyarrow file system for `path`, and the path within it.

    `s3://` uses the endpoint in S3_ENDPOINT_URL or AWS_ENDPOINT_URL, if set. `az://container/…` uses the account in
    AZURE_ACCOUNT_NAME. `oci://` and `hf://` use fsspec.

    Raises:
        UserError: the URL's scheme is not supported, or its package is not installed.
    """
    from pyarrow.fs import FSSpecHandler, GcsFileSystem, LocalFileSystem, PyFileSystem

    if not is_remote(path):
        return LocalFileSystem(), path
    scheme, _, name = without_password(path).partition("://")
    if scheme == "s3":
        return _s3(endpoint()), name
    if scheme == "gs":
        return GcsFileSystem(), name
    if scheme == "az":
        return _azure(), name
    if scheme not in ("oci", "hf"):
        urls = "a local path, s3://, gs://, az://, oci:// or hf://"
        raise UserError(f"{path}: {scheme}:// is not supported; expected {urls}")
    import fsspec

    try:
        system = fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        message = f"{scheme}:// needs a package that is not installed ({first_line(error)})"
        raise UserError(f"{path}: {message}") from None
    return PyFileSystem(FSSpecHandler(system)), name


def endpoint() -> str | None:
    """Return the URL of an S3 store other than Amazon's, from Streaming's or boto3's environment variable.

    Raises:
        UserError: it holds a user and a password.
    """
    for variable in ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"):
        if url := os.environ.get(variable):
            if PASSWORD.match(url):
                raise UserError(
                    f"{variable}: expected an address without user and password, which error messages would show"
                )
            return url
    return None


def region() -> str | None:
    """Return the region of S3 buckets from the environment."""
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
    # Without a region, pyarrow would ask AWS for the bucket's region.
    settings["region"] = region() or "us-east-1"
    return S3FileSystem(endpoint_override=parts.netloc + parts.path, scheme=parts.scheme, **settings)


@lru_cache
def _azure() -> FileSystem:
    from pyarrow.fs import AzureFileSystem

    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if account is None:
        raise UserError("az://: AZURE_ACCOUNT_NAME is not set in the environment")
    return AzureFileSystem(account_name=account, account_key=os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"))
