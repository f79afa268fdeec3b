"""The record that a conversion left beside its splits, found from a run's configuration."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any

from biphasic.config.errors import UserError
from biphasic.config.schema import StreamConfig
from biphasic.storage import is_remote, store

RECORD = "conversion.json"


@dataclass(frozen=True)
class FoundRecord:
    """A conversion's record, the folder or prefix where it lies, and its part on the split that a stream names."""

    folder: str
    record: dict[str, Any]
    split: dict[str, Any]


def parent_of(place: str) -> tuple[str, str]:
    """A split's conversion and the split's own name in it: `s3://b/out/train` gives `s3://b/out` and `train`."""
    parent, name = posixpath.split(place.rstrip("/"))
    return parent or ("" if is_remote(place) else "."), name


def record_of(stream: StreamConfig) -> FoundRecord | None:
    """The record of a stream's rows, from the folder above `local` if there is one, else from above `remote`.

    None when neither can be read: rows need no record to be trained on.
    """
    for place in (stream.local, stream.remote):
        if place is None:
            continue
        folder, name = parent_of(place)
        try:
            record = json.loads(store(folder).read(RECORD))
            splits = record["splits"]
            # A cache may have a name of its own; what is trained on is then the record's only training split.
            split = splits.get(name) or splits.get("train" if place == stream.local and stream.remote else name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
            continue
        if isinstance(split, dict):
            return FoundRecord(folder, record, split)
    return None
