"""Open pyarrow file systems for local paths and bucket URLs, to read byte ranges of files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from biphasic.errors import UserError, first_line
from biphasic.storage.paths import PASSWORD, is_remote, without_password

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

ATTEMPTS = 10
CONNECT_SECONDS, READ_SECONDS = 10, 60
_GCS_RETRIES = timedelta(seconds=60)
"""Google's default is 15 minutes, during which a starting run would print nothing."""


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
        return _s3(endpoint(), name.partition("/")[0]), name
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
        message = f"{scheme}:// needs a package that is not installed ({first_line(error)})"
        raise UserError(f"{path}: {message}") from None
    return PyFileSystem(FSSpecHandler(system)), name


def endpoint() -> str | None:
    """Return the URL of an S3 store other than Amazon's, from Streaming's or boto3's environment variable.

    Raises a UserError if it holds a user and a password, or has no scheme.
    """
    for variable in ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"):
        if url := os.environ.get(variable):
            if PASSWORD.match(url):
                raise UserError(
                    f"{variable}: expected an address without user and password, which error messages would show"
                )
            if not url.startswith(("http://", "https://")):
                raise UserError(f"{variable}: expected an address that begins with http:// or https://")
            return url
    return None


def region() -> str | None:
    """Return the region of S3 buckets from the environment. Stores other than Amazon's need one, but any will do."""
    default = "us-east-1" if endpoint() else None
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or default


@dataclass(frozen=True)
class AzureAccount:
    """A storage account: its name, the URL of its blobs, and its key (None: the SDK's default credential chain)."""

    name: str
    url: str
    key: str | None = field(repr=False)


def azure_account() -> AzureAccount:
    """Return the storage account of `az://`, from the environment.

    AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY are Streaming's variables. AZURE_STORAGE_SERVICE_ENDPOINT, the Azure
    CLI's, is the URL of an account elsewhere: another cloud, a private endpoint or an emulator. Raises a UserError if
    there is no AZURE_ACCOUNT_NAME.
    """
    name = os.environ.get("AZURE_ACCOUNT_NAME")
    if name is None:
        raise UserError("az://: AZURE_ACCOUNT_NAME is not set in the environment")
    url = os.environ.get("AZURE_STORAGE_SERVICE_ENDPOINT") or f"https://{name}.blob.core.windows.net"
    return AzureAccount(name, url.rstrip("/"), os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"))


@lru_cache
def _s3(endpoint: str | None, bucket: str) -> FileSystem:
    """Return the file system of a bucket, with the proxy and the certificates that boto3 takes from the environment."""
    from botocore.httpsession import ProxyConfiguration
    from botocore.utils import get_environ_proxies
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    settings: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "request_timeout": READ_SECONDS,
        "retry_strategy": AwsStandardS3RetryStrategy(int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))),
    }
    if endpoint is None:
        settings["region"] = _bucket_region(bucket)
        url = f"https://{bucket}.s3.{settings['region']}.amazonaws.com"
    else:
        parts, url = urlsplit(endpoint), endpoint
        # Without a region, pyarrow would ask AWS for the bucket's region.
        settings |= {"region": region(), "endpoint_override": parts.netloc + parts.path, "scheme": parts.scheme}
    if proxy := ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url):
        settings["proxy_options"] = proxy
    if certificates := os.environ.get("AWS_CA_BUNDLE"):
        settings["tls_ca_file_path"] = certificates
    return S3FileSystem(**settings)


def _bucket_region(bucket: str) -> str | None:
    """Return the region of one of Amazon's buckets, since pyarrow doesn't follow a redirect to it.

    Amazon names it to anyone who asks for the bucket, also in an answer that refuses access.
    """
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    settings: dict[str, Any] = {
        "signature_version": UNSIGNED,
        "retries": {"total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS)), "mode": "standard"},
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
    }
    try:
        client: Any = boto3.Session().client("s3", region_name=region(), config=Config(**settings))
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region") or region()


@lru_cache
def _gcs(emulator: str | None) -> FileSystem:
    from pyarrow.fs import GcsFileSystem

    if emulator is None:
        return GcsFileSystem(retry_time_limit=_GCS_RETRIES)
    # Google's clients for other languages expect the variable without a scheme.
    parts = urlsplit(emulator if "://" in emulator else f"http://{emulator}")
    return GcsFileSystem(
        anonymous=True, scheme=parts.scheme, endpoint_override=parts.netloc, retry_time_limit=_GCS_RETRIES
    )


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
