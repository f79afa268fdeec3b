"""Estimate what a conversion will need and produce, from the list of files and a small sample of their text."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import numpy as np

from biphasic.amounts import format_bytes, format_seconds
from biphasic.config.convert import ConvertConfig
from biphasic.config.plan import JobPlan
from biphasic.conversion.convert import damaged_files, source_files
from biphasic.conversion.packing import token_dtype
from biphasic.conversion.reading import FILTERED, Document, ReadOptions, Skipped, SourceFile, read_documents
from biphasic.conversion.sources import FileLayout, describe_unread, inspect_files
from biphasic.conversion.work_units import plan_work_units
from biphasic.conversion.worker import boundary_tokens, encode_texts
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.storage import is_remote
from biphasic.workers.resources import available_cores

_SAMPLES, _SAMPLE_DOCUMENTS = 8, 250
_SCRATCH_SHARDS = 9
"""Maximum number of shards on a worker's disk: the one being written, and those waiting for their upload."""


def add_estimate(plan: JobPlan, config: ConvertConfig) -> None:
    """Add the sources' files to a plan and, if nothing is missing, an estimate of tokens, bytes, time and disk use.

    Inspects the sources, and reads and tokenizes a few hundred documents from each of up to eight places in them.

    Raises:
        UserError: the sources or the tokenizer can't be used, or the documents read include none.
    """
    import zstandard

    options = ReadOptions.from_config(config)
    sources = source_files(config)
    files = sources.files
    layouts = inspect_files(files, options)
    damaged, faults = damaged_files(config, files, layouts)
    if faults:
        raise UserError("\n".join(faults))
    units = plan_work_units(files, layouts, config.unit_bytes)
    readable = [(file, layout) for file, layout in zip(files, layouts, strict=True) if layout.fault is None]
    samples: list[list[str]] = []
    bad: list[Skipped] = []
    filtered = 0
    for file in _places(readable):
        entries = list(islice(read_documents(file, options), _SAMPLE_DOCUMENTS))
        samples.append([entry.text for entry in entries if isinstance(entry, Document)])
        skipped = [entry for entry in entries if isinstance(entry, Skipped)]
        bad += [entry for entry in skipped if entry.kind != FILTERED]
        filtered += sum(entry.kind == FILTERED for entry in skipped)
    if (not any(samples) and not filtered) or (bad and config.on_bad_document == "stop"):
        reason = f" {bad[0].where}: {bad[0].reason}" if bad else ": expected documents; the source's files hold none"
        raise UserError(f"source{reason}")
    file_bytes = format_bytes(sum(file.bytes for file in files))
    counted = all(layout.rows for _, layout in readable)
    documents = f", {sum(sum(layout.rows) for _, layout in readable):,} documents" if counted else ""
    plan.lines["files"] = f"{len(files):,} files, {file_bytes}{documents}; {len(units):,} work units"
    plan.lines |= {"not read": describe_unread(sources.unread)} if sources.unread else {}
    plan.lines |= {"left out": "; ".join(damaged)} if damaged else {}
    if plan.missing or plan.problems:
        return
    tokenizer = load_tokenizer(config.tokenizer)
    boundary = sum(len(ids) for ids in boundary_tokens(config, tokenizer))
    texts = [text for part in samples for text in part]
    encode_texts(tokenizer, texts[:10])
    start = time.process_time()
    encoded = [encode_texts(tokenizer, part) for part in samples]
    seconds = max(time.process_time() - start, 1e-9)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    ids = sum(len(document) for part in encoded for document in part)
    sampled_tokens = ids + boundary * len(texts)
    # Each sample is compressed separately, as shards are.
    dtype = token_dtype(tokenizer.vocab_size)
    raw = [np.array([id for document in part for id in document], dtype).tobytes() for part in encoded]
    raw_bytes = sum(len(content) for content in raw)
    packed_bytes = sum(len(zstandard.compress(content)) for content in raw) if config.compression else raw_bytes

    text_bytes = round(sum(unit.bytes for unit in units) * len(texts) / max(len(texts) + filtered, 1))
    tokens = round(text_bytes * sampled_tokens / max(size, 1))
    if config.max_tokens is not None and config.max_tokens < tokens:
        text_bytes, tokens = round(text_bytes * config.max_tokens / tokens), config.max_tokens
    core_seconds = tokens * seconds / max(sampled_tokens, 1)
    workers = config.cluster.workers or available_cores()
    stored_bytes = peak_bytes = round(tokens * packed_bytes / max(ids, 1))
    disk = f"the disk of {Path(config.output)}"
    if is_remote(config.output):
        shard = round(config.shard_bytes * packed_bytes / max(raw_bytes, 1))
        peak_bytes = min(workers, max(len(units), 1)) * _SCRATCH_SHARDS * shard
        disk = "the disks of the workers together"
    plan.lines |= {
        "tokens": f"about {tokens:,}, of {format_bytes(text_bytes)} of text (from {len(texts):,} documents)",
        "bytes": f"about {format_bytes(stored_bytes)} stored",
        "time": f"about {format_seconds(core_seconds)} of one core's tokenizing at this machine's rate; "
        f"{format_seconds(core_seconds / workers)} with {workers} workers",
        "peak disk": f"about {format_bytes(peak_bytes)} on {disk}",
    }


def _places(files: list[tuple[SourceFile, FileLayout]]) -> list[SourceFile]:
    """Return up to eight evenly spaced places to sample: row groups of Parquet files, the beginnings of others."""
    places = [
        SourceFile(file.path, file.bytes, file.version, None if group is None else (group, group + 1))
        for file, layout in files
        for group in (range(len(layout.rows)) if layout.rows else [None])
    ]
    positions = np.linspace(0, len(places) - 1, min(_SAMPLES, len(places))).round().astype(int)
    return [places[position] for position in np.unique(positions)]
