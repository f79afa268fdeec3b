"""Rows as they lie in a conversion's shards, read without Streaming's caches: one shard's bytes at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from biphasic.config.errors import UserError
from biphasic.data.output import RECORD, unfinished
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.storage import join, short, store

if TYPE_CHECKING:
    from streaming.base.format.mds import MDSReader

StoredRow = dict[str, np.ndarray]
_NAMED = 3


def finished_record(output: str) -> dict[str, Any]:
    """The record of a finished conversion.

    Raises:
        UserError: there is none; for an unfinished conversion, with the tasks that are missing.
    """
    place = store(output)
    try:
        return json.loads(place.read(RECORD))
    except FileNotFoundError:
        missing = unfinished(output)
    except (OSError, ValueError) as error:
        raise UserError(f"{join(output, RECORD)}: can't be read ({short(error)})") from None
    if missing is None:
        raise UserError(f"{output}: holds no {RECORD}, so it is no conversion, or an unfinished one")
    some = "; ".join(missing[:_NAMED]) + (" and others" if len(missing) > _NAMED else "")
    which = f"{len(missing)} tasks are missing ({some})" if missing else "all tasks are done, but not merged"
    raise UserError(f"{output}: is an unfinished conversion: {which}; run data_prep/convert.py again to finish it")


def sample_rows(output: str, split: str, count: int) -> Iterator[tuple[int, StoredRow]]:
    """`count` rows of a split, evenly spaced, each with its number.

    Raises:
        UserError: there is no such split.
    """
    splits = finished_record(output)["splits"]
    if split not in splits:
        raise UserError(f"{output}: has no split {split!r}; expected one of {', '.join(splits)}")
    total = splits[split]["rows"]
    count = min(count, total)
    wanted = {round(at * (total - 1) / max(count - 1, 1)) for at in range(count)}
    yield from rows_at(join(output, split), wanted)


def rows_at(place: str, wanted: Iterable[int]) -> Iterator[tuple[int, StoredRow]]:
    """Rows of one dataset's folder by their numbers, each with its own; numbers beyond its end are left out.

    Raises:
        UserError: the dataset can't be read.
    """
    files, first = store(place), 0
    try:
        for shard in json.loads(files.read("index.json"))["shards"]:
            here = sorted(number for number in wanted if first <= number < first + shard["samples"])
            if here:
                file = shard["zip_data"] or shard["raw_data"]
                data = decompressed(shard, files.read(file["basename"]))
                yield from zip(here, rows_of(data, shard_reader(shard), here, first), strict=True)
            first += shard["samples"]
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {place}: can't be read ({short(error)})") from error


def row_count(place: str) -> int:
    """Rows of one dataset's folder.

    Raises:
        UserError: it can't be read.
    """
    try:
        return sum(shard["samples"] for shard in json.loads(store(place).read("index.json"))["shards"])
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {place}: can't be read ({short(error)})") from error


def row_as_text(row: StoredRow, tokenizer: Tokenizer) -> str:
    """A row's segments as text, each under a line with its length; special tokens are shown."""
    lines, at = [], 0
    for number, length in enumerate(row["lengths"].tolist(), start=1):
        ids = row["tokens"][at : at + length].tolist()
        lines += [f"--- segment {number}: {length} tokens", tokenizer.tokenizer.decode(ids, skip_special_tokens=False)]
        at += length
    if padding := len(row["tokens"]) - at:
        lines.append(f"--- padding: {padding} tokens")
    return "\n".join(lines)


def tokenizer_of(output: str) -> Tokenizer:
    """The tokenizer that lies in a conversion."""
    return load_tokenizer(join(output, "tokenizer"))


def shard_reader(shard: dict[str, Any]) -> MDSReader:
    """Streaming's own decoder of a shard's rows; it isn't given any files."""
    from streaming.base.format import reader_from_json

    return reader_from_json("", None, shard)  # pyright: ignore[reportReturnType]


def decompressed(shard: dict[str, Any], stored: bytes) -> bytes:
    """A shard's bytes as the decoder takes them."""
    from streaming.base.compression import decompress

    return decompress(shard["compression"], stored) if shard["zip_data"] else stored


def rows_of(data: bytes, reader: MDSReader, numbers: Iterable[int], first: int) -> Iterator[StoredRow]:
    """The rows with these numbers, counted from `first`, out of a shard's decompressed bytes.

    An MDS file: the number of rows, then one more offset than rows, all uint32; the offsets say where each row lies.
    """
    total = int(np.frombuffer(data, np.uint32, 1)[0])
    offsets = np.frombuffer(data, np.uint32, total + 1, offset=4).tolist()
    for number in numbers:
        yield reader.decode_sample(data[offsets[number - first] : offsets[number - first + 1]])
