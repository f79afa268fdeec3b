"""Describe a conversion: its plan, with an estimate from the files and a small sample of their text, and its result."""

from __future__ import annotations

import glob
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.amounts import format_bytes, format_seconds
from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.plan import JobPlan
from biphasic.conversion.convert import inspect_sources, sample_documents
from biphasic.conversion.reading import FILTERED, Document
from biphasic.conversion.sources import describe_unread
from biphasic.conversion.text_checks import TextChecks, text_warnings, tokenizer_remarks
from biphasic.conversion.tokenizer_check import require_same_encoding
from biphasic.conversion.validation import draw_validation
from biphasic.conversion.work_units import plan_work_units
from biphasic.conversion.worker import boundary_tokens, encode_texts
from biphasic.data.packing import token_dtype
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.limits import available_cores
from biphasic.storage import glob_pattern, is_remote
from biphasic.storage.hub import UNREACHABLE, is_made_by_jobs, why_missing

_SCRATCH_SHARDS = 9
"""Maximum number of shards on a worker's disk: the one being written, and those waiting for their upload."""


def plan_conversion(config: ConvertConfig) -> JobPlan:
    """Return what a conversion reads and writes, with an estimate of tokens, bytes, hours and peak disk.

    If the sources or the tokenizer are missing or can't be used, the plan says so instead of the estimate.
    """
    source, segments = config.source, config.segments
    if isinstance(source, FilesSource):
        text = f"files: {', '.join(source.paths)}"
    else:
        text = ", ".join(filter(None, ["hub dataset " + source.path, source.name, source.split, source.revision]))
    ends = [name for name, added in (("BOS before", config.add_bos), ("EOS after", config.add_eos)) if added]
    if segments.kind == "single":
        cut = "one document a row; longer ones in several rows"
    elif segments.kind == "stream":
        longest = config.sequence_length - segments.shortest
        cut = f"documents joined, cut at random lengths of {segments.shortest} to {longest} tokens (seed {config.seed})"
    else:
        cut = f"a segment is a document; best-fit packing among {segments.window:,} waiting ones"
    share = config.validation_fraction
    splits = f"train/ and validation/ ({100 * share:g}% of documents, by id)" if share else "train/ only"
    limit = "all documents" if config.max_tokens is None else f"until train/ has {config.max_tokens:,} tokens"
    limit += f", {len(config.filters)} filter{'s' * (len(config.filters) > 1)}" if config.filters else ""
    lines = {
        "reads": f"{text} (column {config.text_column}), {limit}",
        "tokenizer": f"{config.tokenizer}; {' and '.join(ends) or 'nothing added to'} each document",
        "rows": f"{config.sequence_length} tokens: {2 * config.sequence_length:,} bytes before compression with up to "
        f"65,536 words, else {4 * config.sequence_length:,}",
        "segments": cut,
        "writes": f"{config.output}: {splits}, tokenizer/, conversion.json; shards of {config.shard_bytes / 2**20:g} MiB, "
        f"{config.compression or 'not compressed'}",
    }
    plan = JobPlan(config.output, config.job, lines)
    for path in source.paths if isinstance(source, FilesSource) else ():
        if not is_remote(path) and not glob.glob(glob_pattern(path), recursive=True):
            messages = plan.missing if is_made_by_jobs(path) else plan.problems
            messages.append(f"source.paths {path}: there is no such file or folder")
    sources_exist = not plan.missing and not plan.problems
    if (reason := why_missing(config.tokenizer)) is not None:
        messages = plan.missing if is_made_by_jobs(config.tokenizer) or UNREACHABLE in reason else plan.problems
        messages.append(f"tokenizer {config.tokenizer}: {reason} (biphasic tokenizer trains one on your text)")
    if sources_exist and (reason is None or isinstance(source, FilesSource)):
        try:
            _add_estimate(plan, config)
        except UserError as error:
            plan.problems += str(error).splitlines()
    return plan


def _add_estimate(plan: JobPlan, config: ConvertConfig) -> None:
    """Add the sources' files to a plan and, if nothing is missing, an estimate of tokens, bytes, time and disk use.

    Inspects the sources, and tokenizes a few hundred documents from each of up to eight places in them. Raises a
    UserError if the sources or the tokenizer can't be used, or no document was found.
    """
    import zstandard

    sources, layouts = inspect_sources(config)
    units = plan_work_units(layouts, config.unit_bytes)
    readable = [layout for layout in layouts if layout.fault is None]
    samples = list(sample_documents(config, layouts))
    skipped = [entry for entries in samples for entry in entries if not isinstance(entry, Document)]
    sampled_texts = [[entry.text for entry in entries if isinstance(entry, Document)] for entries in samples]
    bad = [entry for entry in skipped if entry.kind != FILTERED]
    filtered = len(skipped) - len(bad)
    if (not any(sampled_texts) and not filtered) or (bad and config.on_bad_document == "stop"):
        reason = f" {bad[0].where}: {bad[0].reason}" if bad else ": expected documents; the source's files hold none"
        raise UserError(f"source{reason}")
    files, damaged = sources.files, [layout.fault for layout in layouts if layout.fault]
    file_bytes = format_bytes(sum(file.bytes for file in files))
    counted = all(layout.rows for layout in readable)
    documents = f", {sum(sum(layout.rows) for layout in readable):,} documents" if counted else ""
    plan.lines["files"] = f"{len(files):,} files, {file_bytes}{documents}; {len(units):,} work units"
    tokenizer = None if plan.missing or plan.problems else load_tokenizer(config.tokenizer)
    if config.validation_fraction:
        plan.lines["validation"] = draw_validation(config, layouts).description
    plan.lines |= {"not read": describe_unread(sources.unread, sources.unread_names)} if sources.unread else {}
    plan.lines |= {"left out": "; ".join(damaged)} if damaged else {}
    if tokenizer is None:
        return
    boundary = sum(len(ids) for ids in boundary_tokens(config, tokenizer))
    texts = [text for part in sampled_texts for text in part]
    require_same_encoding(tokenizer, texts)
    encode_texts(tokenizer, texts[:10])
    start = time.process_time()
    encoded = [encode_texts(tokenizer, part) for part in sampled_texts]
    seconds = max(time.process_time() - start, 1e-9)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    ids = sum(len(document) for part in encoded for document in part)
    sampled_tokens = ids + boundary * len(texts)
    plan.lines["tokenizer"] = "\n".join([plan.lines["tokenizer"], *tokenizer_remarks(config, tokenizer)])
    checks = TextChecks(tokenizer)
    for text, document in zip(texts, chain.from_iterable(encoded), strict=True):
        checks.add(text, np.array(document))
    plan.warnings += text_warnings(checks.record())
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


def describe_record(output: str, record: dict[str, Any]) -> str:
    """Return the counts of a finished conversion's record as text."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {split['shards']:,} shards, "
        f"{split['bytes'] / 1e6:,.1f} MB"
        for name, split in record["splits"].items()
    ]
    documents = record["documents"]
    remarks = [f"{documents['filtered']:,} left out by filters"] if documents["filtered"] else []
    remarks += [f"{count:,} skipped ({kind})" for kind, count in documents["skipped"].items()]
    remarks += [f"{documents['repeated']:,} with the id of an earlier one (kept)"] if documents["repeated"] else []
    if remarks:
        lines.append(f"documents: {documents['read']:,} read, {', '.join(remarks)}")
    unread = record["source"]["unread"]
    lines += [f"not read: {describe_unread(unread)}"] if unread else []
    lines += [f"left out: {message}" for message in record["source"]["left_out"]]
    lines += [f"WARNING: {warning}" for warning in text_warnings(record["checks"])]
    tokens = max(sum(split["tokens"] for split in record["splits"].values()), 1)
    stored = sum(split["bytes"] for split in record["splits"].values())
    lines.append(
        f"{stored / tokens:.2f} bytes stored a token, {record['text_bytes'] / tokens:.2f} bytes of text a token, "
        f"{tokens / max(record['cpu_seconds'], 1e-9):,.0f} tokens/s a core"
    )
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s"])
