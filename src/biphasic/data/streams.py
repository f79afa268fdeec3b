"""Streams of rows: the splits that a run reads, how it reads them, and the records of the conversions that wrote them."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import basename, dirname
from typing import Any

from biphasic.errors import UserError
from biphasic.storage import file_hash, is_remote, open_store, user_errors

CONVERSION_RECORD = "conversion.json"
"""File name of a conversion's record, which is written last: if it exists, the output is complete."""
CONVERSION_STARTED = "conversion.started"
"""Name of a file that exists in the output while a conversion is unfinished."""
DEFAULT_CACHE = "data/cache"
INDEX = "index.json"


@dataclass(frozen=True)
class RowStream:
    """One split of a dataset, by the keys of a stream in the YAML; `proportion` only in a mix.

    `cache`: folder in which compressed shards are unpacked if `local` can't be written.
    """

    local: str
    remote: str | None = None
    document_end: int | None = None
    proportion: float | None = None
    cache: str = field(default=DEFAULT_CACHE, compare=False)


@dataclass(frozen=True)
class ReadingSettings:
    """How rows are read and cached, by the keys of `data` in the YAML."""

    sequence_length: int
    epoch_rows: int | None
    shuffle_block_size: int
    num_canonical_nodes: int
    predownload: int | None
    cache_limit: int | None
    num_workers: int


@dataclass(frozen=True)
class StreamRecord:
    """A conversion's record, the folder or bucket prefix that contains it, and its entry for a stream's split."""

    folder: str
    record: dict[str, Any]
    split: dict[str, Any]

    @property
    def tokens_per_row(self) -> float:
        """Average number of tokens in a row, excluding padding."""
        return self.split["tokens"] / self.split["rows"]

    @property
    def segments_per_row(self) -> float:
        """Average number of segments in a row. Those of `stream` span documents, and have half a row on average."""
        kind = self.record.get("config", {}).get("segments", {}).get("kind")
        return 2.0 if kind == "stream" else self.split.get("documents", 0) / self.split["rows"]


def split_conversion_path(path: str) -> tuple[str, str]:
    """Return a split's conversion folder and name: `s3://b/out/train` gives `s3://b/out` and `train`."""
    path = path.rstrip("/")
    return dirname(path) or ("" if is_remote(path) else "."), basename(path)


def read_stream_record(stream: RowStream) -> StreamRecord | None:
    """Read the conversion record of a stream from the parent folder of `local`, or else of `remote`.

    Returns None if neither can be read, since training does not require the record.
    """
    for path in (stream.local, stream.remote):
        if path is None:
            continue
        folder, name = split_conversion_path(path)
        try:
            record = json.loads(open_store(folder).read(CONVERSION_RECORD))
            splits = record["splits"]
            # A cache folder may have any name. If no split has its name, it caches the training split.
            split = splits.get(name) or splits.get("train" if path == stream.local and stream.remote else name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
            continue
        if isinstance(split, dict):
            return StreamRecord(folder, record, split)
    return None


def read_conversions(streams: Mapping[str, RowStream]) -> dict[str, StreamRecord]:
    """Return the conversion records of the training streams that have one, by key."""
    return {key: record for key, stream in streams.items() if (record := read_stream_record(stream)) is not None}


def read_index(dataset: str) -> dict[str, Any]:
    """Return the content of a dataset's index, which lists its shards. Raises a UserError if it can't be read."""
    with user_errors(f"dataset {dataset}: can't be read", ValueError):
        return json.loads(open_store(dataset).read(INDEX))


def index_hashes(streams: Mapping[str, RowStream]) -> dict[str, str]:
    """Return the hash of each opened dataset's index. It lists all shards, so the same hash means the same rows."""
    return {f"{key}.index": file_hash(Path(stream.local) / INDEX) for key, stream in streams.items()}


def opened_streams(streams: Mapping[str, RowStream]) -> tuple[dict[str, RowStream], list[str]]:
    """Return the streams by key, as they are opened, and a line for each that is unpacked elsewhere.

    If the local folder of one can't be written and has shards that are only stored compressed, the folder becomes its
    `remote`, and `local` a folder of its own in the cache, as if the dataset were in a bucket.
    """
    opened, lines = dict(streams), list[str]()
    for key, stream in streams.items():
        if stream.remote is not None:
            continue
        with suppress(UserError, LookupError, TypeError):  # opening it gives the error
            shards = [each for each in read_index(stream.local)["shards"] if each["zip_data"]]
            files = [Path(stream.local, shard["raw_data"]["basename"]) for shard in shards]
            if all(os.access(folder, os.W_OK) for folder in {file.parent for file in files if not file.is_file()}):
                continue
            local = f"{stream.cache}/{key}{os.path.abspath(stream.local)}"
            opened[key] = replace(stream, local=local, remote=stream.local)
            lines.append(f"{key}: {stream.local} can't be written, so its shards are unpacked in {local}")
    return opened, lines
