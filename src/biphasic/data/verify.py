"""Re-reading a conversion, to see that it is what its record says and what its sources hold."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import Any

import numpy as np

from biphasic.config.conversion import ConvertConfig
from biphasic.config.errors import UserError
from biphasic.data.convert import source_files
from biphasic.data.merge import numbers_of, repeated
from biphasic.data.output import LOG, RECORD
from biphasic.data.reading import Reading
from biphasic.data.rows import columns, held_out
from biphasic.data.sources import SourceFile, look_at
from biphasic.data.stored import (
    StoredRow,
    decompressed,
    finished_record,
    rows_of,
    shard_reader,
    tokenizer_of,
)
from biphasic.data.tokenizer import Tokenizer
from biphasic.data.work import Limit, Piece, Task, Work, documents_name, record_name
from biphasic.data.worker import HASH, convert_task
from biphasic.storage import short, store

_WORTH_PROCESSES = 32


@dataclass
class Verification:
    """What was found: one line for each fault, and one for each part that was looked at."""

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

    def add(self, other: _Counts) -> None:
        for name in (each.name for each in fields(self)):
            join = {"shortest": min, "longest": max}.get(name, lambda a, b: a + b)
            setattr(self, name, join(getattr(self, name), getattr(other, name)))


def verify(output: str, *, sources: bool = True, again: int = 0, progress: bool = True) -> Verification:
    """Read everything at `output`, a folder or a bucket's prefix, and compare it with its record.

    Checked: every file's presence, bytes and hash; each row's length, segments, padding and ids; the counts of rows,
    tokens and documents; that no document comes twice or is in the wrong split; that no text holds a mask token; the
    tokenizer. Shards are read by as many processes as there are cores.

    Args:
        output: the conversion.
        sources: compare with the files that were read: are they there, unchanged, and with as many documents?
        again: convert so many tasks once more, and compare the bytes.
        progress: show bars.

    Raises:
        UserError: there is no finished conversion.
    """
    record = finished_record(output)
    result = Verification()
    tokenizer = _tokenizer(output, result)
    if tokenizer is not None and tokenizer.sha256 != record["tokenizer"]["sha256"]:
        result.faults.append("tokenizer/: is not the tokenizer that the record names (another sha256)")
    present = {name: file.bytes for name, file in store(output).list().items()}
    for split, expected in record["splits"].items():
        _split(output, split, expected, record, present, result, progress)
    _documents(output, record, present, result)
    if sources:
        _sources(record, result)
    if again and tokenizer is not None:
        _again(output, record, tokenizer, again, result, progress)
    return result


def _tokenizer(output: str, result: Verification) -> Tokenizer | None:
    try:
        return tokenizer_of(output)
    except (UserError, OSError) as error:
        result.faults.append(f"tokenizer/: can't be loaded ({short(error)})")
        return None


def _split(
    output: str,
    split: str,
    expected: dict[str, Any],
    record: dict[str, Any],
    present: dict[str, int],
    result: Verification,
    progress: bool,
) -> None:
    from tqdm import tqdm

    try:
        content = store(output).read(f"{split}/index.json")
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
    if len(index["shards"]) != len(expected["shards"]):
        counted = f"{len(index['shards'])} shards, the record {len(expected['shards'])}"
        result.faults.append(f"{split}/index.json: lists {counted}")
    counts = _Counts()
    pairs = list(zip(index["shards"], expected["shards"], strict=False))
    known = {key: record[key] for key in ("sequence_length", "dtype", "hash", "tokenizer")}
    there = [{name for name in (f"{split}/{stated['file']}", f"{split}/{shard['raw_data']['basename']}") if name in present}
             for shard, stated in pairs]  # fmt: skip
    with _mapping(len(pairs)) as mapping:
        checks = mapping(_check, repeat(output), repeat(split), pairs, repeat(known), there)
        for fault, found in tqdm(checks, f"{split} shards", len(pairs), unit="shard", disable=not progress):
            counts.add(found)
            result.faults += [fault] if fault else []
    if any(fault.startswith(f"{split}/") for fault in result.faults):
        result.summary.append(f"{split}: {counts.rows:,} of {expected['rows']:,} rows were read without fault")
        return
    measured = {"rows": counts.rows, "tokens": counts.tokens, "bytes": counts.bytes}
    if _whole_documents(record["config"]):
        measured["documents"] = counts.ends
    for what, number in measured.items():
        if number != expected[what]:
            result.faults.append(f"{split}: holds {number:,} {what}, but the record says {expected[what]:,}")
    fill = counts.tokens / max(counts.rows * record["sequence_length"], 1)
    result.summary.append(
        f"{split}: {counts.rows:,} rows of {record['sequence_length']} ({record['dtype']}), {counts.tokens:,} tokens, "
        f"{100 * fill:.2f}% filled, {expected['documents']:,} documents, {counts.segments:,} segments of "
        f"{counts.shortest} to {counts.longest} tokens, {len(pairs)} shards, {counts.bytes / 1e6:,.1f} MB"
    )


def _whole_documents(config: dict[str, Any]) -> bool:
    """Whether each document ends with EOS: not where documents are cut off."""
    truncated = config["segments"]["kind"] == "single" and config["segments"]["longer"] == "truncate"
    return config["add_eos"] and not truncated and config["max_tokens"] is None


@contextmanager
def _mapping(count: int) -> Iterator[Any]:
    """`map`, over as many processes as there are cores where there is enough to do."""
    cores = len(os.sched_getaffinity(0))
    if count < _WORTH_PROCESSES or cores == 1:
        yield map
        return
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _check(
    output: str,
    split: str,
    pair: tuple[dict[str, Any], dict[str, Any]],
    record: dict[str, Any],
    present: dict[str, int],
) -> tuple[str | None, _Counts]:
    """Read one shard: its first fault, and what was counted if there is none."""
    shard, stated = pair
    name = f"{split}/{stated['file']}"
    if name not in present:
        return f"{name}: is missing", _Counts()
    counts = _Counts()
    try:
        fault = _shard(output, split, shard, stated, record, counts)
        raw = shard["raw_data"]
        if not fault and raw["basename"] != stated["file"] and f"{split}/{raw['basename']}" in present:
            fault = _unpacked(output, split, raw, record)
    except Exception as error:  # whatever a damaged file makes the decoder do
        fault = f"can't be decoded ({short(error)})"
    return (f"{name}: {fault}", _Counts()) if fault else (None, counts)


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
    stored = store(output).read(f"{split}/{file['basename']}")
    if len(stored) != stated["bytes"]:
        return f"has {len(stored):,} bytes instead of {stated['bytes']:,}"
    if get_hash(record["hash"], stored) != stated["hash"]:
        return "its content has changed (another hash)"
    reader = shard_reader(shard)
    stored_columns = dict(zip(reader.column_names, reader.column_encodings, strict=True))
    if stored_columns != columns(record["sequence_length"], record["dtype"]):
        return f"holds the columns {stored_columns}"
    for number, row in enumerate(rows_of(decompressed(shard, stored), reader, range(shard["samples"]), 0)):
        if fault := _row(row, record, counts):
            return f"row {number}: {fault}"
    counts.bytes += len(stored)
    return None


def _unpacked(output: str, split: str, raw: dict[str, Any], record: dict[str, Any]) -> str | None:
    """What is wrong with the unpacked copy of a shard, which a training on this folder would read."""
    from streaming.base.hashing import get_hash

    content = store(output).read(f"{split}/{raw['basename']}")
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


def _documents(output: str, record: dict[str, Any], present: dict[str, int], result: Verification) -> None:
    """Is each document there once, and in the split that its id says?"""
    place, tasks = store(output), record["tasks"]
    if absent := [name for task in tasks for name in (record_name(task), documents_name(task)) if name not in present]:
        result.faults.append(f"{absent[0]}: is missing")
        return
    beside = {RECORD, LOG} | {name for task in tasks for name in (record_name(task), documents_name(task))}
    parts = ("tokenizer/", *(f"{split}/" for split in record["splits"]))
    result.faults += [f"{name}: is not in the record" for name in present
                      if name not in beside and not name.startswith(parts)]  # fmt: skip
    fraction = record["config"]["validation_fraction"]
    outside = sum(_held_out(some, fraction) for some in numbers_of(place, tasks))
    total = sum(part["documents"] for part in record["splits"].values())
    counted = sum(present[documents_name(task)] for task in tasks) // 8
    expected = record["splits"].get("validation", {"documents": 0})["documents"]
    if (counted, outside) != (total, expected):
        result.faults.append(
            f"documents/: names {counted:,} documents, {outside:,} for validation; the record {total:,} and {expected:,}"
        )
    if twice := repeated(numbers_of(place, tasks)):
        result.faults.append(f"documents/: {twice:,} documents have an id that came before; the source repeats them")


def _held_out(numbers: np.ndarray, fraction: float) -> int:
    """How many of some documents' numbers, sorted, belong to validation."""
    first, end = 0, len(numbers)
    while first < end:
        middle = (first + end) // 2
        first, end = (middle + 1, end) if held_out(int(numbers[middle]), fraction) else (first, middle)
    return first


def _sources(record: dict[str, Any], result: Verification) -> None:
    """Are the files that were read still there, the same, and with as many documents as were taken?"""
    config = ConvertConfig.model_validate(record["config"])
    then = [SourceFile(**file) for file in record["source"]["files"]]
    try:
        now = {file.path: file for file in source_files(config)[0]}
        changed = [file.path for file in then if now.get(file.path) != file]
        if changed:
            what = "is not there any more" if changed[0] not in now else "has changed since"
            result.faults.append(f"source {changed[0]}: {what}" + (f" ({len(changed)} files)" if changed[1:] else ""))
            return
        looks = look_at(then, Reading.of(config).columns, progress=False)
    except UserError as error:
        result.summary.append(f"sources: not compared ({error})")
        return
    counted = sum(sum(look.rows) for look in looks)
    known = all(look.rows or look.fault for look in looks)
    limited = config.max_documents is not None or config.max_tokens is not None or record["source"]["left_out"]
    read = record["documents"]["read"]
    if known and not limited and counted != read:
        result.faults.append(f"sources: hold {counted:,} documents, and {read:,} were read")
    what = f" and their {counted:,} documents were all read" if known and not limited else ""
    result.summary.append(f"sources: {len(then)} files, unchanged{what}")


def _again(
    output: str, record: dict[str, Any], tokenizer: Tokenizer, count: int, result: Verification, progress: bool
) -> None:
    """Convert some tasks once more, and compare their bytes with what is stored."""
    from tqdm import tqdm

    tasks, before = record["tasks"], len(result.faults)
    count = min(count, len(tasks))
    chosen = [tasks[round(at * (len(tasks) - 1) / max(count - 1, 1))] for at in range(count)]
    for name in tqdm(chosen, "tasks again", unit="task", disable=not progress):
        stored = json.loads(store(output).read(record_name(name)))
        with tempfile.TemporaryDirectory() as folder:
            config = ConvertConfig.model_validate({**record["config"], "output": folder})
            pieces = tuple(
                Piece(**{**piece, "row_groups": piece["row_groups"] and tuple(piece["row_groups"])})
                for piece in stored["pieces"]
            )
            found = convert_task(
                Work.of(config, tokenizer), Task(name, pieces, 0), Limit(**stored["limit"]), lambda *_: None
            )
            same = store(folder).read(documents_name(name)) == store(output).read(documents_name(name))
        if _made(name, found) != _recorded(name, record) or not same:
            result.faults.append(f"task {name} ({pieces[0].path}): converted again it gives other bytes")
    if len(result.faults) == before:
        result.summary.append(f"tasks: {count} of {len(tasks)} converted again, with the same bytes")


def _made(task: str, found: dict[str, Any]) -> dict[str, str]:
    """The hash of each shard that a task gave just now."""
    files = [(split, shard["zip_data"] or shard["raw_data"])
             for split, part in found["splits"].items() for shard in part["shards"]]  # fmt: skip
    return {f"{split}/{task}/{file['basename']}": file["hashes"][HASH] for split, file in files}


def _recorded(task: str, record: dict[str, Any]) -> dict[str, str]:
    """The hash of each of a task's shards in the conversion's record."""
    files = [(split, shard) for split, part in record["splits"].items() for shard in part["shards"]]
    return {f"{split}/{shard['file']}": shard["hash"] for split, shard in files if shard["file"].startswith(task)}
