"""Where the compressed shards of a dataset are unpacked: beside them, or in the cache if their folder can't be written."""

from __future__ import annotations

import os
from pathlib import Path

from biphasic.config.data import StreamConfig
from biphasic.config.phase_inputs import sources
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.mds_reader import read_index
from biphasic.errors import UserError


def unpacked_elsewhere(key: str, stream: StreamConfig, cache: str) -> StreamConfig:
    """Return the stream with this key as it is opened, with `data.cache`.

    If its local folder can't be written and has shards that are only stored compressed, the folder becomes its `remote`, and
    `local` a folder of its own in the cache, as if the dataset were in a bucket.
    """
    if stream.remote is not None:
        return stream
    try:
        files = [
            Path(stream.local, shard["raw_data"]["basename"])
            for shard in read_index(stream.local)["shards"]
            if shard["zip_data"]
        ]
        is_writable = all(
            os.access(folder, os.W_OK) for folder in {file.parent for file in files if not file.is_file()}
        )
    except (UserError, LookupError, TypeError):
        return stream  # opening it gives the error
    local = f"{cache}/{key}{os.path.abspath(stream.local)}"
    return stream if is_writable else stream.model_copy(update={"local": local, "remote": stream.local})


def opened_splits(config: PretrainConfig) -> tuple[dict[str, StreamConfig], list[str]]:
    """Return all streams of a run by key, as they are opened, and a line for each that is unpacked elsewhere."""
    caches = {"data.validation": config.data.cache}
    caches |= {key: each.data.cache for each in sources(config.inputs) for key in each.streams}
    opened = {key: unpacked_elsewhere(key, stream, caches[key]) for key, stream in config.splits.items()}
    moved = [(key, each) for key, each in opened.items() if each != config.splits[key]]
    return opened, [
        f"{key}: {each.remote} can't be written, so its shards are unpacked in {each.local}" for key, each in moved
    ]
