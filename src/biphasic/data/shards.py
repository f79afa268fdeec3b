"""Check that a dataset's shards exist and match their hashes, and raise errors that name the faulty shard."""

import fcntl
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from streaming import Stream
from streaming.base.format import Reader
from streaming.base.storage.download import DOWNLOADER_MAPPINGS, AzureDownloader, GCSDownloader

from biphasic.data.mds_reader import ShardError, shard_file
from biphasic.data.streams import CONVERSION_STARTED, INDEX, RowStream, read_index, split_conversion_path
from biphasic.errors import Unavailable, UserError, first_line
from biphasic.storage import atomic_path, is_inside, is_unreachable, open_store, user_errors
from biphasic.storage.buckets import azure_account
from biphasic.versions import require_form

_DOWNLOAD_ATTEMPTS, _DOWNLOAD_TIMEOUT = 5, 120
"""Number of attempts to download a shard, and the timeout of each in seconds."""


class UnavailableShardError(ShardError, Unavailable):
    """A shard can't be downloaded for now."""


class GoogleDownloader(GCSDownloader):
    """Downloads under another name first: Google's library leaves the part of a download that failed, and Streaming takes
    any file for a complete one."""

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        with atomic_path(Path(local)) as part:
            super()._download_file_impl(remote, str(part), timeout)


class AzureBlobDownloader(AzureDownloader):
    """Downloads `az://container/…` from the account that `biphasic.storage` uses.

    Streaming's own URLs name the account instead (`azure://account/container/…`), always in Azure's public cloud.
    """

    @staticmethod
    def _client_identifier() -> str:
        return "az"

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        super()._download_file_impl(remote.replace("az://", f"azure://{azure_account().name}/", 1), local, timeout)

    def _create_azure_client(self, remote: str) -> None:
        from azure.storage.blob import BlobServiceClient

        self._azure_client = BlobServiceClient(account_url=azure_account().url, credential=self.credential)


DOWNLOADER_MAPPINGS |= {"gs": GoogleDownloader, "az": AzureBlobDownloader}


class CheckedStream(Stream):
    """A stream that checks its shards against the index and raises errors that name the faulty shard."""

    def get_shards(self, world: Any, allow_unsafe_types: bool) -> list[Reader]:
        """Read the index, close the client that downloaded it, and refuse shards outside the stream's folder.

        Loader processes, which are forked later, would share an inherited client's connection and read each other's
        responses. Raises a UserError if the cache holds another dataset, or a shard's path leads out of the folder.
        """
        try:
            if self.remote is not None and world.is_local_leader:
                self._require_own_cache()
            shards = super().get_shards(world, allow_unsafe_types)
        finally:
            self._downloader.clean_up()
        folder = Path(self.local)
        names = {info.basename for shard in shards for pair in shard.file_pairs for info in pair if info is not None}
        for name in sorted(names):
            if not is_inside(name):
                raise UserError(f"{folder / INDEX}: names the shard {name!r}, which leads out of its folder")
        for parent in sorted({(folder / name).parent for name in names}):
            if not parent.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{folder / INDEX}: names shards in {parent}, which is a link out of its folder")
        return shards

    def _require_own_cache(self) -> None:
        # Streaming would read the rows of the dataset in the cache.
        index, downloaded = Path(self.local) / INDEX, f"{INDEX}.{secrets.token_hex(4)}"
        if not index.is_file():
            return
        try:
            with user_errors(f"dataset {self.remote}: can't be opened", Exception):
                remote = Path(self._download_file(INDEX, downloaded)).read_bytes()
        finally:
            (index.parent / downloaded).unlink(missing_ok=True)
        if remote != index.read_bytes():
            advice = "remove it if no other job reads it, or set another one (data.cache, or the stream's `local`)"
            raise UserError(f"{self.local}: holds the shards of another dataset than {self.remote}: {advice}")

    def prepare_shard(self, shard: Any) -> int:
        """Download, check and unpack a shard, and return by how many bytes the cache has grown.

        After an error, removes the downloaded part, so that it is not used later, and raises a ShardError.
        """
        try:
            return super().prepare_shard(shard)
        except Exception as error:
            if str(error).startswith("Checksum failure"):
                raise self._damaged(shard, f"its {self.validate_hash} is not the one") from error
            kind = UnavailableShardError if is_unreachable(error) else ShardError
            name = self._remove(shard)
            raise kind(f"shard {name}: can't be read into {self.local} ({first_line(error)})") from error

    def require_unchanged(self, shard: Any, number: int, checked: Any) -> bool:
        """Compare the file that a shard's rows are read from with the index, unless its entry in `checked` is set.

        Returns True. Raises a ShardError if the file has changed since then, and a FileNotFoundError if there is none.
        """
        import xxhash

        raw, _ = shard.file_pairs[0]
        with Path(self.local, raw.basename).open("rb") as file:
            with suppress(OSError):  # without locks, as on some network disks, several processes may compare it
                fcntl.flock(file, fcntl.LOCK_EX)
            if checked[number]:
                return True
            size, name = os.fstat(file.fileno()).st_size, self.validate_hash or ""
            if size != raw.bytes:
                raise self._damaged(shard, f"{file.name} has {size:,} bytes instead of the {raw.bytes:,}")
            algorithm: Any = getattr(xxhash, name, name)
            if name in raw.hashes and hashlib.file_digest(file, algorithm).hexdigest() != raw.hashes[name]:
                raise self._damaged(shard, f"the {name} of {file.name} is not the one")
            checked[number] = True
        return True

    def _damaged(self, shard: Any, problem: str) -> ShardError:
        cache = f" (or {self.local} is the cache of other data: empty it)" if self.remote is not None else ""
        message = f"is damaged: {problem} in {Path(self.local) / INDEX}; none of its rows were used"
        check = f"check the conversion with `biphasic verify` and restore the shard{cache}"
        return ShardError(f"shard {self._remove(shard)}: {message}; {check}")

    def _remove(self, shard: Any) -> str:
        """Remove a shard's files that can be made again, and return the name of the stored one."""
        raw, packed = shard.file_pairs[0]
        for info in [raw] * (packed is not None) if self.remote is None else [raw, packed or raw]:
            for name in (info.basename, f"{info.basename}.tmp"):
                Path(self.local, name).unlink(missing_ok=True)
        return f"{self.remote or self.local}/{(packed or raw).basename}"

    def _decompress_shard_part(self, zip_info: Any, zip_filename: str, raw_filename: str, compression: Any) -> None:
        # Under a unique name first, because several jobs may unpack the same shard of a local dataset.
        unpacked = f"{raw_filename}.{secrets.token_hex(4)}"
        try:
            super()._decompress_shard_part(zip_info, zip_filename, unpacked, compression)
            os.replace(unpacked, raw_filename)
        finally:
            Path(f"{unpacked}.tmp").unlink(missing_ok=True)


def open_stream(stream: RowStream) -> CheckedStream:
    """Build Streaming's object for a stream without reading the data.

    Raises a UserError if the dataset is missing or unfinished, or this version of Streaming unpacks shards differently.
    """
    name = "_decompress_shard_part"
    require_form("mosaicml-streaming", Stream, name, getattr(CheckedStream, name))
    _require_dataset(stream.remote or stream.local, stream.local)
    return CheckedStream(
        local=stream.local,
        remote=stream.remote,
        proportion=stream.proportion,
        download_retry=_DOWNLOAD_ATTEMPTS,
        download_timeout=_DOWNLOAD_TIMEOUT,
    )


def require_shards(stream: RowStream, only_first: bool = False) -> None:
    """Read a dataset's index and first shard, and check the shard's hash and, unless `only_first`, the sizes of all shards.

    Raises a UserError if anything fails.
    """
    import xxhash

    dataset = stream.remote or stream.local
    _require_dataset(dataset, dataset)
    with user_errors(f"dataset {dataset}: its first shard can't be read", LookupError):
        files = [shard_file(shard) for shard in read_index(dataset)["shards"]]
        first, content = files[0], open_store(dataset).read(files[0]["basename"])
    expected = first["hashes"].get("xxh64")
    if expected is not None and xxhash.xxh64(content).hexdigest() != expected:
        raise UserError(f"shard {dataset}/{first['basename']}: is damaged: its xxh64 is not the one in {INDEX}")
    if only_first:
        return
    with user_errors(f"dataset {dataset}: can't be listed"):
        store = open_store(dataset)
        listed = store.list()
        for file in files:
            name, size = file["basename"], int(file["bytes"])
            # Its folder may be a link, which the list of a local folder leaves out.
            stored = listed.get(name) or store.stat(name)
            if stored is None or stored.bytes != size:
                problem = "is missing" if stored is None else f"has {stored.bytes:,} bytes instead of {size:,}"
                advice = "restore it before the run, which would stop when it needs it"
                raise UserError(f"shard {dataset}/{name}: {problem}: {advice}")


def _require_dataset(dataset: str, local: str) -> None:
    conversion = split_conversion_path(dataset)[0]
    with user_errors(f"dataset {dataset}: can't be opened"):
        if (Path(local) / INDEX).is_file() or open_store(dataset).stat(INDEX) is not None:
            return
        is_unfinished = open_store(conversion).stat(CONVERSION_STARTED) is not None
    if is_unfinished:
        advice = "run `biphasic verify` on it to see which work units are missing"
        advice = f"{advice}, and `biphasic convert` again to finish it"
        raise UserError(f"{conversion}: its conversion is not finished; {advice}")
    raise UserError(f"no dataset in {dataset} (it has no {INDEX}): convert one first, see docs/data.md")
