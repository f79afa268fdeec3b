"""One dataset's shards: whether they are there, their hashes, and errors that name the shard at fault."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from streaming import Stream

from biphasic.config.errors import UserError
from biphasic.config.records import parent_of
from biphasic.config.schema import DataConfig, MixedStreamConfig, StreamConfig
from biphasic.storage import Store, hash_of, short, store
from biphasic.versions import require_form

INDEX, STARTED = "index.json", "conversion.started"


class LoaderError(UserError):
    """The loader can't go on. PyTorch makes a worker's error anew from the worker's traceback; this one stays a line."""

    def __init__(self, message: str):
        if "Traceback" in message:
            message = message.strip().splitlines()[-1].partition("Error: ")[2] or message
        super().__init__(message)


class ShardError(LoaderError):
    """A shard can't be used. Unlike other faults it may show on any rank, and in the middle of a run."""


class CheckedStream(Stream):
    """A dataset whose shards are what their index says, or else an error that says which one isn't."""

    def prepare_shard(self, shard: Any) -> int:
        """Download, check and unpack a shard; returns by how many bytes the cache has grown.

        Raises:
            ShardError: any of it failed. What was downloaded of the shard is removed, so that nobody takes it for whole.
        """
        try:
            return super().prepare_shard(shard)
        except Exception as error:
            raw, packed = shard.file_pairs[0]
            file, folder = (packed or raw).basename, Path(self.local)
            where = f"{self.remote or self.local}/{file}"
            if self.remote is not None:
                for info in (raw, packed):
                    for name in [] if info is None else [info.basename, f"{info.basename}.tmp"]:
                        (folder / name).unlink(missing_ok=True)
            if str(error).startswith("Checksum failure"):
                cache = f" (or {folder} is the cache of other data: empty it)" if self.remote is not None else ""
                message = f"is damaged: its {self.validate_hash} is not the one in {folder / INDEX}"
                check = f"check the conversion with data_prep/verify.py and put the shard right{cache}"
                raise ShardError(f"shard {where}: {message}; nothing of it was used; {check}") from error
            raise ShardError(f"shard {where}: can't be read into {folder} ({short(error)})") from error

    def _decompress_shard_part(
        self, zip_info: Any, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        """Unpack under a name of this process's own: several jobs may read one local dataset and unpack the same shard."""
        unpacked = f"{raw_filename}.{secrets.token_hex(4)}"
        try:
            super()._decompress_shard_part(zip_info, zip_filename, unpacked, compression)
            os.replace(unpacked, raw_filename)
        finally:
            Path(f"{unpacked}.tmp").unlink(missing_ok=True)


def open_stream(config: DataConfig, stream: StreamConfig) -> CheckedStream:
    """A stream as Streaming takes it, without looking at the data.

    Raises:
        UserError: there is no dataset, or only a part of one; or this version of Streaming unpacks shards in another way.
    """
    name = "_decompress_shard_part"
    require_form("mosaicml-streaming", Stream, name, getattr(CheckedStream, name))
    _require_dataset(stream)
    return CheckedStream(
        local=stream.local,
        remote=stream.remote,
        proportion=stream.proportion if isinstance(stream, MixedStreamConfig) else None,
        download_retry=config.download_retry,
        download_timeout=config.download_timeout,
    )


def check_hashes(stream: CheckedStream) -> None:
    """From now on compare each shard with its hash in the index, which Streaming has fetched by now."""
    shards = json.loads((Path(stream.local) / INDEX).read_text(encoding="utf-8"))["shards"]
    stream.validate_hash = next(iter(shards[0]["hashes"]), None) if shards else None


def indexes(streams: dict[str, StreamConfig]) -> dict[str, str]:
    """The hash of each opened dataset's index, which names all of its shards: wherever they lie, the rows are the same."""
    return {f"{key}.index": hash_of(Path(stream.local) / INDEX) for key, stream in streams.items()}


def require_first_shard(stream: StreamConfig) -> None:
    """Read a dataset's index and its first shard where they lie, and compare the shard with its hash.

    Raises:
        UserError: one can't be read, or the shard is damaged.
    """
    import xxhash

    place = stream.remote or stream.local
    _require_dataset(StreamConfig(local=place))
    files = store(place)
    try:
        shard = json.loads(files.read(INDEX))["shards"][0]
        file = shard["zip_data"] or shard["raw_data"]
        content = files.read(file["basename"])
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"dataset {place}: its first shard can't be read ({short(error)})") from error
    expected = file["hashes"].get("xxh64")
    if expected is not None and xxhash.xxh64(content).hexdigest() != expected:
        raise UserError(f"shard {place}/{file['basename']}: is damaged: its xxh64 is not the one in {INDEX}")


def _require_dataset(stream: StreamConfig) -> None:
    if (Path(stream.local) / INDEX).is_file():
        return
    place = stream.remote or stream.local
    files = _store(place)
    if files is None:
        return
    try:
        if files.stat(INDEX) is not None:
            return
        parent = parent_of(place)[0]
        above = _store(parent)
        unfinished = above is not None and above.stat(STARTED) is not None
    except OSError as error:
        raise UserError(f"dataset {place}: can't be opened ({short(error)})") from error
    if unfinished:
        raise UserError(
            f"{parent}: its conversion is not finished; run data_prep/verify.py on it to see which tasks are missing, "
            "and data_prep/convert.py again to finish it"
        )
    raise UserError(f"no dataset in {place} (it has no {INDEX}): convert one first, see docs/data.md")


def _store(place: str) -> Store | None:
    """The files at `place`; None for a kind that Streaming may know and Biphasic doesn't."""
    try:
        return store(place)
    except UserError:
        return None
