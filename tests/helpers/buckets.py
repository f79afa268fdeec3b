"""Datasets in the buckets of the S3 server that the fixture `s3` runs."""

import gc
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3

from biphasic.config.data import DataConfig
from biphasic.data.streaming import build_loader
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.storage.buckets import azure_account


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])


def bucket_for(s3: Path, name: str) -> str:
    """A bucket of a test's own; returns its name."""
    bucket = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-")
    if not (s3 / bucket).exists():
        client().create_bucket(Bucket=bucket)
    return bucket


def make_bucket(address: str) -> str:
    """Make the bucket at `s3://…`, `gs://…` or `az://…` if it isn't there; returns its address."""
    scheme, _, name = address.partition("://")
    if scheme == "s3":
        with suppress(client().exceptions.BucketAlreadyOwnedByYou, client().exceptions.BucketAlreadyExists):
            client().create_bucket(Bucket=name)
    elif scheme == "gs":
        from google.api_core.exceptions import Conflict
        from google.cloud.storage import Client

        with suppress(Conflict):
            Client().create_bucket(name)
    else:
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        account = azure_account()
        with suppress(ResourceExistsError):
            BlobServiceClient(account.url, credential=account.key).create_container(name)
    return address


def upload_to(folder: Path, address: str) -> str:
    """Put a folder's files into any store, with its own means; returns the address."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            open_store(address).upload(path, path.relative_to(folder).as_posix())
    return address


def upload(folder: Path, bucket: str, prefix: str) -> str:
    """Put a folder's files into the bucket; returns their address."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    return f"s3://{bucket}/{prefix}"


def flip_a_bit(bucket: str, key: str) -> None:
    """Damage an object, without a change of its size."""
    content = bytearray(client().get_object(Bucket=bucket, Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client().put_object(Bucket=bucket, Key=key, Body=bytes(content))


def smallest_limit(config: DataConfig, *, train: bool = True) -> int:
    """The smallest limit, as named by the error about a limit of 1 KB."""
    try:
        limited = config.model_copy(update={"cache_limit": 1000})
        build_loader(limited.reading, limited.streams, 8, seed=3, train=train)
    except UserError as error:
        message = str(error)
    else:
        raise AssertionError("1kb was accepted")
    # The error held the dataset, and with it Streaming's lock on the folder.
    gc.collect()
    match = re.match(r"data\.cache_limit: 1,000b is too small: .* expected at least ([\d,]+)b", message)
    assert match, message
    return int(match[1].replace(",", ""))
