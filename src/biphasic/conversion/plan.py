"""Describe a conversion: its plan, with an estimate from the files and a small sample of their text, and its result."""

import glob
import time
from pathlib import Path
from typing import Any

from biphasic.amounts import format_bytes, format_seconds
from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.plan import JobPlan
from biphasic.conversion.convert import check_encoding, inspect_sources, sample_documents
from biphasic.conversion.reading import FILTERED, Document
from biphasic.conversion.sources import FileLayout, describe_unread, draw_validation
from biphasic.conversion.tokenizer_checks import TextChecks, text_warnings
from biphasic.conversion.worker import WorkUnit, boundary_tokens, encode_texts, plan_work_units
from biphasic.data.bulk_encoding import BulkEncoder
from biphasic.data.packing import token_dtype
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.processes import available_cores
from biphasic.storage import glob_pattern, is_remote
from biphasic.storage.hub import UNREACHABLE, is_made_by_jobs, why_missing

_SCRATCH_SHARDS = 9
"""Maximum number of shards on a worker's disk: the one being written, and those waiting for their upload."""


def plan_conversion(config: ConvertConfig) -> JobPlan:
    """Return what a conversion reads and writes, with an estimate of tokens, bytes, hours and peak disk.

    If the sources or the tokenizer are missing or can't be used, the plan says so instead of the estimate.
    """
    source, share = config.source, config.validation_fraction
    if isinstance(source, FilesSource):
        text = f"files: {', '.join(source.paths)}"
    else:
        text = ", ".join(filter(None, ["hub dataset " + source.path, source.name, source.split, source.revision]))
    limit = "all documents" if config.max_tokens is None else f"until train/ has {config.max_tokens:,} tokens"
    limit += ", as far as they pass the filters" if config.filters else ""
    splits = f"train/ and validation/ ({100 * share:g}% of documents, by id)" if share else "train/ only"
    lines = {
        "reads": f"{text} (column {config.text_column}), {limit}",
        "tokenizer": config.tokenizer,
        "writes": f"{config.output}: {splits}, rows of {config.sequence_length} tokens, segments: {config.segments.kind}",
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
            _add_files(plan, config)
        except UserError as error:
            plan.problems += str(error).splitlines()
    return plan


def _add_files(plan: JobPlan, config: ConvertConfig) -> None:
    """Add the sources' files to a plan and, if nothing is missing, an estimate from a sample of their text."""
    sources, layouts = inspect_sources(config)
    units = plan_work_units(layouts, config.unit_bytes)
    readable = [layout for layout in layouts if layout.fault is None]
    counted = all(layout.rows for layout in readable)
    documents = f", {sum(sum(layout.rows) for layout in readable):,} documents" if counted else ""
    file_bytes = format_bytes(sum(file.bytes for file in sources.files))
    plan.lines["files"] = f"{len(sources.files):,} files, {file_bytes}{documents}; {len(units):,} work units"
    plan.lines |= {"not read": describe_unread(sources.unread)} if sources.unread else {}
    left_out = [layout.fault for layout in layouts if layout.fault]
    plan.lines |= {"left out": "; ".join(left_out)} if left_out else {}
    if config.validation_fraction:
        _, plan.lines["validation"] = draw_validation(config, layouts)
    _add_estimate(plan, config, layouts, units)


def _add_estimate(plan: JobPlan, config: ConvertConfig, layouts: list[FileLayout], units: list[WorkUnit]) -> None:
    import zstandard

    entries = list(sample_documents(config, layouts))
    texts = [entry.text for entry in entries if isinstance(entry, Document)]
    bad = [entry for entry in entries if not isinstance(entry, Document) and entry.kind != FILTERED]
    filtered = len(entries) - len(texts) - len(bad)
    if (not texts and not filtered) or (bad and config.on_bad_document == "stop"):
        reason = f" {bad[0].where}: {bad[0].reason}" if bad else ": expected documents; the source's files hold none"
        raise UserError(f"source{reason}")
    if plan.missing or plan.problems:
        return
    tokenizer = load_tokenizer(config.tokenizer)
    boundary = sum(len(ids) for ids in boundary_tokens(config, tokenizer))
    backend, remarks = check_encoding(config, tokenizer, texts)
    plan.lines["tokenizer"] = "\n".join([config.tokenizer, *remarks])
    encoder = BulkEncoder(tokenizer, backend)
    encode_texts(encoder, texts[:10])
    start = time.process_time()
    encoded = [ids.astype(token_dtype(tokenizer.vocab_size)) for ids in encode_texts(encoder, texts)]
    seconds = max(time.process_time() - start, 1e-9)
    checks = TextChecks(tokenizer)
    for text, ids in zip(texts, encoded, strict=True):
        checks.add(text, ids)
    plan.warnings += text_warnings(checks.record())
    stored = b"".join(ids.tobytes() for ids in encoded)
    sampled_tokens = sum(map(len, encoded)) + boundary * len(texts)
    sampled_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    packed = zstandard.compress(stored) if config.compression else stored
    stored_per_token = len(packed) / max(sampled_tokens, 1)

    text_bytes = round(sum(unit.bytes for unit in units) * len(texts) / max(len(texts) + filtered, 1))
    tokens = round(text_bytes * sampled_tokens / max(sampled_bytes, 1))
    if config.max_tokens is not None and config.max_tokens < tokens:
        text_bytes, tokens = round(text_bytes * config.max_tokens / tokens), config.max_tokens
    core_seconds = tokens * seconds / max(sampled_tokens, 1)
    workers = config.cluster.workers or available_cores()
    peak_bytes, disk = round(tokens * stored_per_token), f"the disk of {Path(config.output)}"
    if is_remote(config.output):
        shard = round(config.shard_bytes * len(packed) / max(len(stored), 1))
        peak_bytes = min(workers, max(len(units), 1)) * _SCRATCH_SHARDS * shard
        disk = "the disks of the workers together"
    plan.lines |= {
        "tokens": f"about {tokens:,}, of {format_bytes(text_bytes)} of text (from {len(texts):,} documents)",
        "bytes": f"about {format_bytes(round(tokens * stored_per_token))} stored",
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
    lines += [f"documents: {documents['read']:,} read, {', '.join(remarks)}"] if remarks else []
    lines += [f"not read: {describe_unread(record['source']['unread'])}"] if record["source"]["unread"] else []
    lines += [f"left out: {message}" for message in record["source"]["left_out"]]
    lines += [f"WARNING: {warning}" for warning in text_warnings(record["checks"])]
    tokens = sum(split["tokens"] for split in record["splits"].values())
    rate = tokens / max(record["cpu_seconds"], 1e-9)
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s, {rate:,.0f} tokens/s a core"])
