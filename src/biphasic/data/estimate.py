"""What a conversion will take and give: counted from the files' lists, estimated from a small sample of their text."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from biphasic.amounts import in_bytes, in_time
from biphasic.config.conversion import ConvertConfig
from biphasic.data.convert import source_files
from biphasic.data.reading import FILTERED, Document, Reading
from biphasic.data.rows import token_dtype
from biphasic.data.sources import look_at, read_file
from biphasic.data.tokenizer import load_tokenizer
from biphasic.data.work import plan_tasks
from biphasic.data.worker import document_ends, encode
from biphasic.storage import is_remote

_FILES, _DOCUMENTS = 8, 250
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
    """Look at a conversion's sources, and tokenize a few hundred documents of up to eight of its files.

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
    spread = np.unique(np.linspace(0, len(usable) - 1, min(_FILES, len(usable))).round().astype(int)) if usable else []
    texts: list[str] = []
    seen = 0
    for at in spread:
        for found in islice(read_file(usable[at][0], reading), _DOCUMENTS):
            seen += 1
            if isinstance(found, Document):
                texts.append(found.text)
            elif found.kind != FILTERED:
                seen -= 1
    encode(tokenizer, texts[:10])
    start = time.process_time()
    encoded = encode(tokenizer, texts)
    seconds = max(time.process_time() - start, 1e-9)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    found = sum(len(ids) + ends for ids in encoded)
    ids = np.array([id for some in encoded for id in some], dtype=token_dtype(tokenizer.vocab_size))
    stored = ids.tobytes()
    packed = len(zstandard.compress(stored)) if config.compression else len(stored)
    kept = len(texts) / max(seen, 1)
    text_bytes = round(sum(task.bytes for task in tasks) * kept)
    tokens = round(text_bytes * found / max(size, 1))
    if config.max_tokens is not None and config.max_tokens < tokens:
        text_bytes, tokens = round(text_bytes * config.max_tokens / tokens), config.max_tokens
    workers = config.cluster.workers or max(len(os.sched_getaffinity(0)) // config.cluster.cpus_per_worker, 1)
    stored_bytes = round(tokens * packed / max(len(ids), 1))
    shard = round(config.shard_bytes * packed / max(len(stored), 1))
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
