"""Re-reading a conversion, to see that it is what its record says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from biphasic.config.errors import UserError
from biphasic.data.rows import columns
from biphasic.data.storage import RECORD, files_below, join, read_bytes, short
from biphasic.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from streaming.base.format.mds import MDSReader

StoredRow = dict[str, np.ndarray]


@dataclass
class Verification:
    """What was found: one line for each fault, and one for each split that was read."""

    faults: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)


@dataclass
class _Counts:
    rows: int = 0
    tokens: int = 0
    ends: int = 0
    bytes: int = 0
    shortest: int = 1 << 62
    longest: int = 0
    segments: int = 0


def verify(output: str, *, progress: bool = True) -> Verification:
    """Read everything at `output`, a folder or a bucket's prefix, and compare it with its record.

    Checked: every file's presence, bytes and hash; each row's length, segments, padding and ids; the counts of rows and
    tokens; of documents too, where each ends with EOS; that no text holds a mask token; the tokenizer.

    Raises:
        UserError: there is no record, so nothing to compare with.
    """
    record = _record(output)
    result = Verification()
    tokenizer = _tokenizer(output, result)
    if tokenizer is not None and tokenizer.sha256 != record["tokenizer"]["sha256"]:
        result.faults.append("tokenizer/: is not the tokenizer that the record names (another sha256)")
    present = files_below(output)
    for split, expected in record["splits"].items():
        _split(output, split, expected, record, present, result, progress)
    return result


def sample_rows(output: str, split: str, count: int) -> Iterator[tuple[int, StoredRow]]:
    """`count` rows of a split, evenly spaced, each with its number."""
    total = _record(output)["splits"][split]["rows"]
    count = min(count, total)
    wanted = {round(at * (total - 1) / max(count - 1, 1)) for at in range(count)}
    first = 0
    for shard in _index(output, split)["shards"]:
        here = sorted(number for number in wanted if first <= number < first + shard["samples"])
        rows = _rows(_shard_data(output, split, shard), _reader(shard), here, first) if here else iter(())
        yield from zip(here, rows, strict=True)
        first += shard["samples"]


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
    with TemporaryDirectory() as folder:
        for name in files_below(join(output, "tokenizer")):
            (Path(folder) / Path(name).name).write_bytes(read_bytes(join(output, f"tokenizer/{name}")))
        return load_tokenizer(folder)


def _record(output: str) -> dict[str, Any]:
    if RECORD not in files_below(output):
        raise UserError(f"{output}: holds no {RECORD}, so it is no conversion, or an unfinished one")
    try:
        return json.loads(read_bytes(join(output, RECORD)))
    except (OSError, ValueError) as error:
        raise UserError(f"{join(output, RECORD)}: can't be read ({short(error)})") from None


def _tokenizer(output: str, result: Verification) -> Tokenizer | None:
    try:
        return tokenizer_of(output)
    except (UserError, OSError) as error:
        result.faults.append(f"tokenizer/: can't be loaded ({short(error)})")
        return None


def _index(output: str, split: str) -> dict[str, Any]:
    return json.loads(read_bytes(join(output, f"{split}/index.json")))


def _split(
    output: str,
    split: str,
    expected: dict[str, Any],
    record: dict[str, Any],
    present: dict[str, int],
    result: Verification,
    progress: bool,
) -> None:
    import streaming  # noqa: F401  # seconds, which the bar would count as the first shard's
    from tqdm import tqdm

    try:
        content = read_bytes(join(output, f"{split}/index.json"))
        index = json.loads(content)
    except (OSError, ValueError) as error:
        result.faults.append(f"{split}/index.json: can't be read ({short(error)})")
        return
    if hashlib.sha256(content).hexdigest() != expected["index_sha256"]:
        result.faults.append(f"{split}/index.json: is not the one that the record names (another sha256)")
    listed = {shard["file"] for shard in expected["shards"]} | {"index.json"}
    # Streaming unpacks shards beside the compressed ones when it reads them from where they lie.
    listed |= {shard["raw_data"]["basename"] for shard in index["shards"]}
    for name in sorted(present):
        if name.startswith(f"{split}/") and name.removeprefix(f"{split}/") not in listed:
            result.faults.append(f"{name}: is not in the record")
    counts = _Counts()
    shards = list(zip(index["shards"], expected["shards"], strict=False))
    if len(index["shards"]) != len(expected["shards"]):
        counted = f"{len(index['shards'])} shards, the record {len(expected['shards'])}"
        result.faults.append(f"{split}/index.json: lists {counted}")
    for shard, stated in tqdm(shards, desc=f"{split} shards", unit="shard", disable=not progress):
        name = f"{split}/{stated['file']}"
        if name not in present:
            result.faults.append(f"{name}: is missing")
            continue
        try:
            fault = _shard(output, split, shard, stated, record, counts)
            raw = shard["raw_data"]
            if not fault and raw["basename"] != stated["file"] and f"{split}/{raw['basename']}" in present:
                fault = _unpacked(output, split, raw, record)
        except Exception as error:  # whatever a damaged file makes the decoder do
            fault = f"can't be decoded ({short(error)})"
        if fault:
            result.faults.append(f"{name}: {fault}")
    if any(fault.startswith(f"{split}/") for fault in result.faults):
        result.summary.append(f"{split}: {counts.rows:,} of {expected['rows']:,} rows were read without fault")
        return
    measured = {"rows": counts.rows, "tokens": counts.tokens, "bytes": counts.bytes}
    if record["config"]["add_eos"]:
        measured["documents"] = counts.ends
    for what, number in measured.items():
        if number != expected[what]:
            result.faults.append(f"{split}: holds {number:,} {what}, but the record says {expected[what]:,}")
    fill = counts.tokens / max(counts.rows * record["sequence_length"], 1)
    result.summary.append(
        f"{split}: {counts.rows:,} rows of {record['sequence_length']} ({record['dtype']}), {counts.tokens:,} tokens, "
        f"{100 * fill:.2f}% filled, {expected['documents']:,} documents, {counts.segments:,} segments of "
        f"{counts.shortest} to {counts.longest} tokens, {len(shards)} shards, {counts.bytes / 1e6:,.1f} MB"
    )


def _shard(
    output: str,
    split: str,
    shard: dict[str, Any],
    stated: dict[str, Any],
    record: dict[str, Any],
    counts: _Counts,
) -> str | None:
    """Read one shard; returns its first fault, or adds to the counts."""
    from streaming.base.hashing import get_hash

    file = shard["zip_data"] or shard["raw_data"]
    if (file["basename"], shard["samples"]) != (stated["file"], stated["rows"]):
        return "the index and the record disagree about it"
    stored = read_bytes(join(output, f"{split}/{file['basename']}"))
    if len(stored) != stated["bytes"]:
        return f"has {len(stored):,} bytes instead of {stated['bytes']:,}"
    if get_hash(record["hash"], stored) != stated["hash"]:
        return "its content has changed (another hash)"
    reader = _reader(shard)
    stored_columns = dict(zip(reader.column_names, reader.column_encodings, strict=True))
    if stored_columns != columns(record["sequence_length"], record["dtype"]):
        return f"holds the columns {stored_columns}"
    data = _decompressed(shard, stored)
    for number, row in enumerate(_rows(data, reader, range(shard["samples"]), 0)):
        if fault := _row(row, record, counts):
            return f"row {number}: {fault}"
    counts.bytes += len(stored)
    return None


def _unpacked(output: str, split: str, raw: dict[str, Any], record: dict[str, Any]) -> str | None:
    """What is wrong with the unpacked copy of a shard, which a training on this folder would read."""
    from streaming.base.hashing import get_hash

    content = read_bytes(join(output, f"{split}/{raw['basename']}"))
    right = get_hash(record["hash"], content) == raw["hashes"][record["hash"]]
    return None if right else f"its unpacked copy {raw['basename']} has changed; remove it"


def _row(row: StoredRow, record: dict[str, Any], counts: _Counts) -> str | None:
    """The first thing that is wrong with a row; if nothing is, adds it to the counts."""
    tokens, lengths, names = row["tokens"], row["lengths"].astype(np.int64), record["tokenizer"]
    filled = int(lengths.sum())
    if len(tokens) != record["sequence_length"]:
        return f"has {len(tokens)} tokens instead of {record['sequence_length']}"
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1 or filled > len(tokens):
        return f"its segment lengths can't be: {lengths.tolist()[:8]}"
    if (largest := int(tokens.max())) >= names["vocab_size"]:
        return f"holds id {largest}, and the vocabulary has {names['vocab_size']}"
    if (tokens[filled:] != names["pad_id"]).any():
        return "holds something other than padding after its last segment"
    if (tokens[:filled] == names["mask_id"]).any():
        return "holds a mask token"
    counts.rows += 1
    counts.tokens += filled
    counts.ends += 0 if names["eos_id"] is None else int((tokens[:filled] == names["eos_id"]).sum())
    counts.segments += len(lengths)
    counts.shortest, counts.longest = min(counts.shortest, int(lengths.min())), max(counts.longest, int(lengths.max()))
    return None


def _reader(shard: dict[str, Any]) -> MDSReader:
    """Streaming's own decoder of a shard's rows; it isn't given any files."""
    from streaming.base.format import reader_from_json

    return reader_from_json("", None, shard)  # pyright: ignore[reportReturnType]


def _shard_data(output: str, split: str, shard: dict[str, Any]) -> bytes:
    file = shard["zip_data"] or shard["raw_data"]
    return _decompressed(shard, read_bytes(join(output, f"{split}/{file['basename']}")))


def _decompressed(shard: dict[str, Any], stored: bytes) -> bytes:
    from streaming.base.compression import decompress

    return decompress(shard["compression"], stored) if shard["zip_data"] else stored


def _rows(data: bytes, reader: MDSReader, numbers: Any, first: int) -> Iterator[StoredRow]:
    """The rows with these numbers, counted from `first`, out of a shard's decompressed bytes.

    An MDS file: the number of rows, then one more offset than rows, all uint32; the offsets say where each row lies.
    """
    total = int(np.frombuffer(data, np.uint32, 1)[0])
    offsets = np.frombuffer(data, np.uint32, total + 1, offset=4).tolist()
    for number in numbers:
        yield reader.decode_sample(data[offsets[number - first] : offsets[number - first + 1]])
