"""Read rows of MDS datasets without Streaming's caches, one shard at a time, from a folder or a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.storage import open_store, user_errors

StoredRow = dict[str, np.ndarray]
INDEX = "index.json"


class ShardError(UserError):
    """A shard can't be used. This can happen on any rank and in the middle of a run.

    Its message stays one line, although PyTorch rebuilds a loader process's error from its traceback.
    """

    def __init__(self, message: str):
        if "Traceback" in message:
            message = message.strip().splitlines()[-1].partition("Error: ")[2] or message
        super().__init__(message)


def read_rows(dataset: str, row_ids: Iterable[int]) -> Iterator[tuple[int, StoredRow]]:
    """Yield rows of a dataset with their ids, but none beyond its end. Raises a UserError if it can't be read."""
    first, row_ids = 0, sorted(set(row_ids))
    with user_errors(f"dataset {dataset}: can't be read", ValueError):
        store = open_store(dataset)
        for shard in json.loads(store.read(INDEX))["shards"]:
            in_shard = [row_id for row_id in row_ids if first <= row_id < first + shard["samples"]]
            if in_shard:
                content = store.read(shard_file(shard)["basename"])
                yield from zip(in_shard, decode_rows(shard, content, [id - first for id in in_shard]), strict=True)
            first += shard["samples"]


def read_index(dataset: str) -> dict[str, Any]:
    """Return the content of a dataset's index, which lists its shards. Raises a UserError if it can't be read."""
    with user_errors(f"dataset {dataset}: can't be read", ValueError):
        return json.loads(open_store(dataset).read(INDEX))


def row_as_text(row: StoredRow, tokenizer: Tokenizer) -> str:
    """Return a row's segments as text with special tokens, each below a line with its length."""
    lines, start = [], 0
    for number, length in enumerate(row["lengths"].tolist(), start=1):
        ids = row["tokens"][start : start + length].tolist()
        lines += [f"--- segment {number}: {length} tokens", tokenizer.tokenizer.decode(ids, skip_special_tokens=False)]
        start += length
    if padding := len(row["tokens"]) - start:
        lines.append(f"--- padding: {padding} tokens")
    return "\n".join(lines)


def shard_file(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the index entry (basename, bytes, hashes) of a shard's stored file, the compressed one if it exists."""
    return shard["zip_data"] or shard["raw_data"]


def decode_rows(shard: dict[str, Any], content: bytes, numbers: Iterable[int]) -> Iterator[StoredRow]:
    """Yield the rows with these numbers from the bytes of a shard's stored file.

    An MDS file starts with the number of rows, followed by one more offset than rows, all uint32. Row i lies between
    offsets i and i + 1.
    """
    from streaming.base.compression import decompress
    from streaming.base.format import reader_from_json

    if shard["zip_data"]:
        content = decompress(shard["compression"], content)
    # Streaming's decoder is used without its access to files.
    decoder: Any = reader_from_json("", None, shard)
    # A column of pickles could run any code.
    decoder.validate(allow_unsafe_types=False)
    total = int(np.frombuffer(content, np.uint32, 1)[0])
    offsets = np.frombuffer(content, np.uint32, total + 1, offset=4).tolist()
    for number in numbers:
        yield decoder.decode_sample(content[offsets[number] : offsets[number + 1]])
