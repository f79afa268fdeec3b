"""Read rows of token ids that other programs have written to MDS, as the rows of a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from biphasic.data.mds_reader import ShardError, StoredRow, decode_rows, read_index, shard_file
from biphasic.data.streams import RowStream, read_stream_record
from biphasic.errors import UserError
from biphasic.storage import open_store, user_errors

_CONVERSION = re.compile(r"lengths \(ndarray:uint32\), tokens \(ndarray:(uint16|uint32):(\d+)\)")
_IDS = re.compile(r"(tokens|input_ids) \((?:bytes|ndarray:(uint16|int32|uint32|int64)(?::(\d+))?)\)")
_BESIDE = re.compile(r"id \((?:str|int)\)|len \(u?int(?:16|32|64)?\)")
_MOST_BESIDE, _MOST_HEADER = 300, 1000
"""Most bytes of a row beside its ids (such as an `id`), and of a shard beside its rows, for a length that may be right."""


def row_reader(
    key: str, stream: RowStream, index: Mapping[str, Any], length: int, vocab_size: int | None
) -> Callable[[Mapping[str, Any]], StoredRow]:
    """Decide how the rows of the stream with this key are read, from its index, which lists at least one shard.

    Returns a function from a stored row to `tokens` [length] and `lengths` uint32 [segments]. It raises a ShardError if a
    row has another length, or an id that isn't in the vocabulary (None: any). Raises a UserError if the columns can't be
    read as rows of `length` tokens (`data.sequence_length`), or `document_end` can't be used.
    """
    dataset, shards, end = stream.remote or stream.local, index["shards"], stream.document_end
    described = " or ".join(sorted({_describe(shard) for shard in shards}))
    columns, own = described.split(", "), _CONVERSION.fullmatch(described)
    ids = [match for each in columns if (match := _IDS.fullmatch(each))]
    if own is None and (len(ids) != 1 or not all(_IDS.fullmatch(each) or _BESIDE.fullmatch(each) for each in columns)):
        raise UserError(
            f"{key}: the rows of {dataset} have {described}: expected those of a conversion, or a column `tokens` or "
            f"`input_ids` of {length} ids (ndarray:uint16, int32, uint32 or int64, or bytes), beside at most `id` and "
            "`len` (docs/data.md, Datasets of others)"
        )
    column, array_type, stored_length = ("tokens", *own.groups()) if own is not None else ids[0].groups()
    types = ["int64", "int32", "uint16"] if array_type is None else [array_type]
    if stored_length is None:
        rows = sum(shard["samples"] for shard in shards)
        size = sum(shard["raw_data"]["bytes"] for shard in shards) / rows
        size -= sum(column_size or 4 for column_size in shards[0]["column_sizes"])
        most = _MOST_BESIDE + _MOST_HEADER * len(shards) / rows
        stored_length = " or ".join(f"about {size / np.dtype(name).itemsize:,.0f} ({name})" for name in types)
        types = [name for name in types if 0 <= size - np.dtype(name).itemsize * length <= most]
    if not types or (stored_length.isdecimal() and int(stored_length) != length):
        raise UserError(
            f"{key.partition('data.')[0]}data.sequence_length is {length}, but the rows of {key} in {dataset} have "
            f"{stored_length} tokens"
            + (": they were converted with another sequence_length" if own is not None else "")
        )
    if end is not None and (own is not None or (vocab_size is not None and end >= vocab_size)):
        reason = (
            f"expected an id below {vocab_size}" if own is None else "has no effect on a conversion's rows: remove it"
        )
        raise UserError(f"{key}.document_end: {reason} ({dataset})")
    size = np.dtype(types[0]).itemsize

    def read(row: Mapping[str, Any]) -> StoredRow:
        tokens, name = row[column], f"dataset {dataset}: a row"
        shape = tokens.shape if array_type is not None else (len(tokens) / size,)
        if shape != (length,) or row.get("len", length) != length:
            count = row.get("len", "x".join(f"{each:g}" for each in shape))
            raise ShardError(f"{name} has {count} tokens; expected exactly data.sequence_length ({length}) in each")
        if array_type is None:
            tokens = np.frombuffer(tokens, types[0])
            if size < 8 and tokens.any() and not tokens[1::2].any():
                problem = f"has {length // 2} ids of {2 * size} bytes, not data.sequence_length ({length})"
                raise ShardError(f"{name} {problem}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            raise ShardError(f"{name} has token ids from {low} to {high}, but `tokenizer` has {vocab_size} tokens")
        if own is not None:
            return dict(row)
        ends = [] if end is None else np.flatnonzero(tokens == end) + 1
        return {"tokens": tokens, "lengths": np.diff(np.union1d(ends, [length]), prepend=0).astype(np.uint32)}

    return read


def stored_row_problems(
    streams: Mapping[str, RowStream], lengths: Mapping[str, int], vocab_size: int | None, *, first_shards: bool
) -> list[str]:
    """Return why rows of `lengths` tokens, by key, can't be read from the streams: by columns, or others' first shards.

    Conversions with a record are left out, and datasets whose index can't be read: other checks report those.
    """
    problems = []
    for key, stream in streams.items():
        dataset = stream.remote or stream.local
        with suppress(UserError, LookupError, TypeError):
            index, is_recorded = read_index(dataset), read_stream_record(stream) is not None
            shard = index["shards"][0]
            try:
                if not is_recorded:
                    read = row_reader(key, stream, index, lengths[key], vocab_size)
                    if first_shards and "lengths" not in shard["column_names"]:
                        with user_errors(f"dataset {dataset}: can't be read", ValueError):
                            content = open_store(dataset).read(shard_file(shard)["basename"])
                            for row in decode_rows(shard, content, range(shard["samples"])):
                                read(row)
            except UserError as error:
                problems.append(str(error))
    return problems


def _describe(shard: Mapping[str, Any]) -> str:
    columns = shard.get("columns") or dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    return ", ".join(f"{name} ({columns[name]})" for name in sorted(columns))
