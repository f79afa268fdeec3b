"""What a conversion will take and give: counted from the files' lists, estimated from a small sample of their text."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from biphasic.amounts import in_bytes, in_time
from biphasic.config.conversion import ConvertConfig
from biphasic.data.convert import source_files
from biphasic.data.reading import FILTERED, Document, Piece, Reading, read_documents
from biphasic.data.rows import token_dtype
from biphasic.data.sources import Looked, SourceFile, look_at
from biphasic.data.tokenizer import load_tokenizer
from biphasic.data.work import plan_tasks
from biphasic.data.worker import document_ends, encode
from biphasic.storage import is_remote

_PARTS, _DOCUMENTS = 8, 250
_SHARDS_WAITING = 9
"""Shards of a worker that lie on its disk at most: one that is being written, and those that wait for their upload."""


@dataclass(frozen=True)
class Estimate:
    """`documents` is None where the files don't say how many they hold. `core_seconds` are of this machine's cores."""

    files: int
    file_bytes: int
    tasks: int
    documents: int | None
    text_bytes: int
    tokens: int
    stored_bytes: int
    core_seconds: float
    workers: int
    peak_disk_bytes: int
    sampled: int


def estimate(config: ConvertConfig) -> Estimate:
    """Look at a conversion's sources, and tokenize a few hundred documents of up to eight places in them.

    Raises:
        UserError: sources or tokenizer can't be used.
    """
    import zstandard

    tokenizer = load_tokenizer(config.tokenizer)
    ends = sum(len(ids) for ids in document_ends(config, tokenizer))
    reading = Reading.of(config)
    files, _ = source_files(config)
    looks = look_at(files, reading.columns)
    tasks = plan_tasks(files, looks, config.task_bytes)
    usable = [(file, look) for file, look in zip(files, looks, strict=True) if look.fault is None]
    texts: list[str] = []
    ends_of_parts: list[int] = []
    seen = 0
    for part in _spread(usable):
        for found in islice(read_documents(part, reading), _DOCUMENTS):
            seen += 1
            if isinstance(found, Document):
                texts.append(found.text)
            elif found.kind != FILTERED:
                seen -= 1
        ends_of_parts.append(len(texts))
    encode(tokenizer, texts[:10])
    start = time.process_time()
    encoded = encode(tokenizer, texts)
    seconds = max(time.process_time() - start, 1e-9)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    found = sum(len(ids) + ends for ids in encoded)
    # Each part's by themselves, as shards are: what parts have in common is not stored once.
    samples = [encoded[first:last] for first, last in pairwise([0, *ends_of_parts])]
    parts = [_as_stored(sample, tokenizer.vocab_size) for sample in samples]
    raw = sum(len(part) for part in parts)
    packed = sum(len(zstandard.compress(part)) for part in parts) if config.compression else raw
    kept = len(texts) / max(seen, 1)
    text_bytes = round(sum(task.bytes for task in tasks) * kept)
    tokens = round(text_bytes * found / max(size, 1))
    if config.max_tokens is not None and config.max_tokens < tokens:
        text_bytes, tokens = round(text_bytes * config.max_tokens / tokens), config.max_tokens
    workers = config.cluster.workers or max(len(os.sched_getaffinity(0)) // config.cluster.cpus_per_worker, 1)
    stored_bytes = round(tokens * packed / max(sum(len(ids) for ids in encoded), 1))
    shard = round(config.shard_bytes * packed / max(raw, 1))
    scratch = min(workers, max(len(tasks), 1)) * _SHARDS_WAITING * shard
    counted = None if any(not look.rows for _, look in usable) else sum(sum(look.rows) for _, look in usable)
    return Estimate(
        files=len(files),
        file_bytes=sum(file.bytes for file in files),
        tasks=len(tasks),
        documents=counted,
        text_bytes=text_bytes,
        tokens=tokens,
        stored_bytes=stored_bytes,
        core_seconds=tokens * seconds / max(found, 1),
        workers=workers,
        peak_disk_bytes=scratch if is_remote(config.output) else stored_bytes,
        sampled=len(texts),
    )


def _spread(files: list[tuple[SourceFile, Looked]]) -> list[Piece]:
    """Up to eight places in the text, evenly far apart: row groups of Parquet files, the beginnings of others."""
    places = [
        file.piece(None if group is None else (group, group + 1))
        for file, look in files
        for group in (range(len(look.rows)) if look.rows else [None])
    ]
    return [
        places[at] for at in np.unique(np.linspace(0, len(places) - 1, min(_PARTS, len(places))).round().astype(int))
    ]


def _as_stored(encoded: list[list[int]], vocab_size: int) -> bytes:
    return np.array([id for ids in encoded for id in ids], dtype=token_dtype(vocab_size)).tobytes()


def describe(found: Estimate, config: ConvertConfig) -> dict[str, str]:
    """The estimate as a person reads it, by what it is about."""
    documents = "" if found.documents is None else f", {found.documents:,} documents"
    where = "the disks of the workers together" if is_remote(config.output) else f"the disk of {Path(config.output)}"
    alone, together = in_time(found.core_seconds), in_time(found.core_seconds / found.workers)
    return {
        "files": f"{found.files:,} files, {in_bytes(found.file_bytes)}{documents}; {found.tasks:,} tasks",
        "tokens": f"about {found.tokens:,}, of {in_bytes(found.text_bytes)} of text (from {found.sampled:,} documents)",
        "bytes": f"about {in_bytes(found.stored_bytes)} stored",
        "time": f"about {alone} of one core's tokenizing at this machine's rate; {together} with {found.workers} workers",
        "peak disk": f"about {in_bytes(found.peak_disk_bytes)} on {where}",
    }
