"""List, read, atomically write and remove files in local folders and buckets, through one interface.

Paths are local, or `s3://…`, `gs://…`, `az://…`, `oci://…`, `hf://…`. Credentials come only from the default chain of each
SDK (environment, configuration files, the instance's role). `filesystem` returns a pyarrow file system for reading byte
ranges. S3 is written through boto3, because some stores refuse pyarrow's uploads (no Content-Length).
"""

from posixpath import join

from biphasic.storage.azure import AzureStore
from biphasic.storage.buckets import ArrowStore, S3Store, filesystem, is_unreachable, user_error, user_errors
from biphasic.storage.files import (
    LOCK_FILE,
    UNFINISHED_PREFIX,
    LocalStore,
    StoredFile,
    atomic_path,
    cached_file_hash,
    file_hash,
    glob_pattern,
    is_folder,
    is_free,
    is_hidden,
    is_inside,
    is_remote,
    json_bytes,
    parquet_bytes,
    without_password,
)

__all__ = [
    "LOCK_FILE", "UNFINISHED_PREFIX", "LocalStore", "Store", "StoredFile", "atomic_path",
    "cached_file_hash", "file_hash", "filesystem", "glob_pattern", "is_folder", "is_free", "is_hidden",
    "is_inside", "is_remote", "is_unreachable", "join", "json_bytes", "open_store", "parquet_bytes", "user_error",
    "user_errors",
]  # fmt: skip

Store = LocalStore | S3Store | ArrowStore


def open_store(path: str) -> Store:
    """Return the store for a local folder or a bucket prefix. Raises a UserError if the URL can't be used."""
    if not is_remote(without_password(path)):
        return LocalStore(path)
    kinds: dict[str, type[S3Store | ArrowStore]] = {"s3": S3Store, "az": AzureStore}
    return kinds.get(path.partition("://")[0], ArrowStore)(path)
