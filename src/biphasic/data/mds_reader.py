"""Read rows of MDS datasets: without Streaming's caches, and token ids that other programs have written."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import zstd

from biphasic.data.streams import RowStream, read_index
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.storage import open_store, user_errors

StoredRow = dict[str, np.ndarray]
_PADDING = 8  # tokens: fewer may be separators of empty documents
_CONVERSION = re.compile(r"lengths \(ndarray:uint32\), tokens \(ndarray:(uint16|uint32):(\d+)\)")
_IDS = re.compile(r"(tokens|input_ids) \((?:bytes|ndarray:(uint16|int32|uint32|int64)(?::(\d+))?)\)")
_BESIDE = re.compile(r"id \((?:str|int)\)|len \(u?int(?:16|32|64)?\)")


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
    for shard in read_index(dataset)["shards"]:
        if in_shard := [row_id for row_id in row_ids if first <= row_id < first + shard["samples"]]:
            yield from zip(in_shard, rows_of_shard(dataset, shard, [id - first for id in in_shard]), strict=True)
        first += shard["samples"]


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


def rows_of_shard(dataset: str, shard: dict[str, Any], numbers: Iterable[int]) -> Iterator[StoredRow]:
    """Yield the rows with these numbers of a dataset's shard. Raises a UserError if the shard can't be read."""
    name = shard_file(shard)["basename"]
    with user_errors(f"dataset {dataset}: {name} can't be read", ValueError):
        yield from decode_rows(shard, open_store(dataset).read(name), numbers)


def decode_rows(shard: dict[str, Any], content: bytes, numbers: Iterable[int]) -> Iterator[StoredRow]:
    """Yield the rows with these numbers from the bytes of a shard's stored file.

    An MDS file starts with the number of rows, followed by one more offset than rows, all uint32. Row i lies between
    offsets i and i + 1.
    """
    if shard["zip_data"] and shard["compression"].startswith("zstd"):
        content = zstd.decompress(content)
    elif shard["zip_data"]:
        from streaming.base.compression import decompress

        content = decompress(shard["compression"], content)
    own = _CONVERSION.fullmatch(_describe(shard))
    decode = _others_decoder(shard) if own is None else partial(_decode_own, own[1])
    total = int(np.frombuffer(content, np.uint32, 1)[0])
    offsets = np.frombuffer(content, np.uint32, total + 1, offset=4).tolist()
    for number in numbers:
        yield decode(content[offsets[number] : offsets[number + 1]])


def _decode_own(dtype: str, row: bytes) -> StoredRow:
    """Decode a conversion's row: bytes of the lengths (uint32), their shape (1 + 1, 2 or 4 bytes), they, the tokens."""
    end = 4 + int.from_bytes(row[:4], "little")
    start = 5 + (1 << (row[4] & 3))
    lengths = np.frombuffer(row[start:end], np.uint32)
    if int.from_bytes(row[5:start], "little") != len(lengths):
        raise ValueError("the lengths of a row's segments are not as many as it says")
    return {"lengths": lengths, "tokens": np.frombuffer(row[end:], dtype)}


def _others_decoder(shard: dict[str, Any]) -> Callable[[bytes], StoredRow]:
    """Return Streaming's decoder of a shard's rows, which is used without its access to files."""
    from streaming.base.format import reader_from_json

    decoder: Any = reader_from_json("", None, shard)
    # A column of pickles could run any code.
    decoder.validate(allow_unsafe_types=False)
    return decoder.decode_sample


def row_reader(
    key: str, stream: RowStream, index: Mapping[str, Any], length: int, tokenizer: Tokenizer | None
) -> Callable[[Mapping[str, Any]], StoredRow]:
    """Decide how the rows of the stream with this key are read, from its index, which lists at least one shard.

    Returns a function from a stored row to `tokens` [length] and `lengths` uint32 [segments]. It raises a ShardError if a
    row has another length, an id that `tokenizer` lacks, or padding. Raises a UserError if the columns can't be read as rows
    of `length` tokens (`data.sequence_length`), `document_end` can't be used, or a shard is listed twice.
    """
    dataset, shards, end = stream.remote or stream.local, index["shards"], stream.document_end
    vocab_size, pad = (None, None) if tokenizer is None else (tokenizer.vocab_size, tokenizer.pad_id)
    if tokenizer is not None and pad in (end, tokenizer.eos_id, tokenizer.bos_id, tokenizer.unknown_id):
        pad = None  # rows may end with it
    described = " or ".join(sorted({_describe(shard) for shard in shards}))
    columns, own = described.split(", "), _CONVERSION.fullmatch(described)
    ids = [match for each in columns if (match := _IDS.fullmatch(each))]
    if own is None and (len(ids) != 1 or not all(_IDS.fullmatch(each) or _BESIDE.fullmatch(each) for each in columns)):
        raise UserError(
            f"{key}: the rows of {dataset} have {described}: expected those of a conversion, or a column `tokens` or "
            f"`input_ids` of {length} ids (ndarray:uint16, int32, uint32 or int64, or bytes of int64), beside at most "
            "`id` and `len` (docs/data.md, Datasets of others)"
        )
    column, array_type, stored_length = ("tokens", *own.groups()) if own is not None else ids[0].groups()
    if stored_length is not None and int(stored_length) != length:
        section, reason = key.partition("data.")[0], ": they were converted with another sequence_length" if own else ""
        problem = f"the rows of {key} in {dataset} have {stored_length} tokens{reason}"
        raise UserError(f"{section}data.sequence_length is {length}, but {problem}")
    if end is not None and (own is not None or (vocab_size is not None and end >= vocab_size)):
        reason = "has no effect on a conversion's rows: remove it" if own else f"expected an id below {vocab_size}"
        raise UserError(f"{key}.document_end: {reason} ({dataset})")
    [(name, count)] = Counter(shard_file(shard)["basename"] for shard in shards).most_common(1)
    if count > 1:
        raise UserError(
            f"{key}: the index of {dataset} lists {name} {count} times, so another file is never read: expected each file "
            "once, by its path in this folder (Streaming's merge_index keeps only the last folder of a path)"
        )

    def read(row: Mapping[str, Any]) -> StoredRow:
        tokens, name = row[column], f"dataset {dataset}: a row"
        shape = tokens.shape if array_type is not None else (len(tokens) / 8,)
        if shape != (length,) or row.get("len", length) != length:
            count = row.get("len", "x".join(f"{each:g}" for each in shape))
            raise ShardError(f"{name} has {count} tokens; expected exactly data.sequence_length ({length}) in each")
        tokens = tokens if array_type is not None else np.frombuffer(tokens, np.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            raise ShardError(f"{name} has token ids from {low} to {high}, but `tokenizer` has {vocab_size} tokens")
        if own is not None:
            return dict(row)
        if pad is not None and (np.all(tokens[:_PADDING] == pad) or np.all(tokens[-_PADDING:] == pad)):
            advice = f"if documents end with this id, set {key}.document_end={pad}"
            raise ShardError(
                f"{name} has padding (id {pad}) at an end; expected {length} tokens of text, joined or cut: {advice}"
            )
        ends = [] if end is None else np.flatnonzero(tokens == end) + 1
        return {"tokens": tokens, "lengths": np.diff(np.union1d(ends, [length]), prepend=0).astype(np.uint32)}

    return read


def _describe(shard: Mapping[str, Any]) -> str:
    columns = shard.get("columns") or dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    return ", ".join(f"{name} ({columns[name]})" for name in sorted(columns))
