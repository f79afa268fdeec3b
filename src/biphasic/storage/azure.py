"""Read and write files in Azure containers."""

from pathlib import Path
from typing import Any

from biphasic.storage.buckets import CONNECT_SECONDS, READ_SECONDS, ArrowStore, as_os_error, azure_account

_UPLOADED_BLOCKS = 8
"""Blocks of a file that are uploaded to Azure at the same time, 4 MiB each."""


class AzureStore(ArrowStore):
    """A prefix in an Azure container.

    pyarrow makes an empty blob before it writes one, and reads one with two requests: another process would read no content,
    or the beginning of a longer one. Azure's own library does both at once.
    """

    @as_os_error()
    def __init__(self, root: str):
        from azure.storage.blob import ContainerClient, ExponentialRetry

        super().__init__(root)
        container, account = self._prefix.partition("/")[0], azure_account()
        credential: Any = account.key
        if credential is None:
            from azure.identity import DefaultAzureCredential

            credential = DefaultAzureCredential()
        settings: dict[str, Any] = {"connection_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        retries = ExponentialRetry(initial_backoff=1)
        self._client = ContainerClient(account.url, container, credential, retry_policy=retries, **settings)

    @as_os_error()
    def read(self, name: str) -> bytes:
        return self._client.download_blob(self._blob(name)).readall()

    @as_os_error()
    def write(self, name: str, content: bytes) -> None:
        self._client.upload_blob(self._blob(name), content, overwrite=True)

    @as_os_error()
    def upload(self, file: Path, name: str) -> None:
        with file.open("rb") as content:
            self._client.upload_blob(self._blob(name), content, overwrite=True, max_concurrency=_UPLOADED_BLOCKS)

    def _blob(self, name: str) -> str:
        return self._key(name).partition("/")[2]
