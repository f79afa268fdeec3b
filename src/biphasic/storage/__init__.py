"""Files in folders and in buckets, through one small interface: list, read, write whole, remove.

Paths are local, or `s3://…`, `gs://…`, `az://…`, `oci://…`, `hf://…`. Credentials come from each SDK's own chain (the
environment, its files, the machine's role) and from nowhere else. Reading by byte ranges goes through `filesystem`,
which is pyarrow's; S3 is written through boto3, since some stores refuse pyarrow's uploads (no Content-Length).
"""

from __future__ import annotations

from biphasic.storage.buckets import ArrowStore, S3Store
from biphasic.storage.filesystems import filesystem
from biphasic.storage.local import LocalStore, hash_of, unfinished
from biphasic.storage.place import UNFINISHED, Store, StoredFile, as_bytes, is_remote, join, short

__all__ = [
    "UNFINISHED", "LocalStore", "Store", "StoredFile", "as_bytes", "filesystem", "hash_of", "is_remote", "join",
    "short", "store", "unfinished",
]  # fmt: skip


def store(path: str) -> Store:
    """Where `path` lies.

    Raises:
        UserError: a kind of bucket that isn't known, or whose package isn't installed.
    """
    if not is_remote(path):
        return LocalStore(path)
    return S3Store(path) if path.startswith("s3://") else ArrowStore(path)
