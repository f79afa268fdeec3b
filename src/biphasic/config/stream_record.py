"""Find and read the record (`conversion.json`) that a conversion writes beside its splits."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any

from biphasic.config.data import DataConfig, StreamConfig
from biphasic.errors import UserError
from biphasic.storage import is_remote, open_store

CONVERSION_RECORD = "conversion.json"
"""File name of a conversion's record, which is written last: if it exists, the output is complete."""
CONVERSION_STARTED = "conversion.started"
"""Name of a file that exists in the output while a conversion is unfinished."""


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


def split_conversion_path(path: str) -> tuple[str, str]:
    """Return a split's conversion folder and name: `s3://b/out/train` gives `s3://b/out` and `train`."""
    parent, name = posixpath.split(path.rstrip("/"))
    return parent or ("" if is_remote(path) else "."), name


def read_stream_record(stream: StreamConfig) -> StreamRecord | None:
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


def read_conversions(data: DataConfig) -> dict[str, StreamRecord]:
    """Return the conversion records of the training streams that have one, by key."""
    records = {key: read_stream_record(stream) for key, stream in data.streams.items()}
    return {key: record for key, record in records.items() if record is not None}
