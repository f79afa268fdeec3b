"""Describe a conversion as text: its plan, and what it wrote."""

from __future__ import annotations

import glob
from typing import Any

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.plan import JobPlan
from biphasic.conversion.estimate import add_estimate
from biphasic.conversion.sources import describe_unread
from biphasic.errors import UserError
from biphasic.storage import is_remote
from biphasic.storage.hub import UNREACHABLE, is_made_by_jobs, why_missing


def plan_conversion(config: ConvertConfig) -> JobPlan:
    """Return what a conversion reads and writes, with an estimate of tokens, bytes, hours and peak disk.

    The plan names sources and tokenizer that are not there or can't be used, instead of the estimate.
    """
    source, segments = config.source, config.segments
    if isinstance(source, FilesSource):
        text = f"files: {', '.join(source.paths)}"
    else:
        text = ", ".join(filter(None, ["hub dataset " + source.path, source.name, source.split, source.revision]))
    ends = [name for name, added in (("BOS before", config.add_bos), ("EOS after", config.add_eos)) if added]
    if segments.kind == "single":
        cut = f"one document a row; longer ones {'cut off' if segments.longer == 'truncate' else 'in several rows'}"
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
        if not is_remote(path) and not glob.glob(path, recursive=True):
            messages = plan.missing if is_made_by_jobs(path) else plan.problems
            messages.append(f"source.paths {path}: there is no such file or folder")
    sources_exist = not plan.missing and not plan.problems
    if (reason := why_missing(config.tokenizer)) is not None:
        messages = plan.missing if is_made_by_jobs(config.tokenizer) or UNREACHABLE in reason else plan.problems
        messages.append(f"tokenizer {config.tokenizer}: {reason} (biphasic tokenizer trains one on your text)")
    if sources_exist and (reason is None or isinstance(source, FilesSource)):
        try:
            add_estimate(plan, config)
        except UserError as error:
            plan.problems += str(error).splitlines()
    return plan


def describe_record(output: str, record: dict[str, Any]) -> str:
    """Return the counts of a finished conversion's record as text."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {len(split['shards'])} shards, "
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
    tokens = max(sum(split["tokens"] for split in record["splits"].values()), 1)
    stored = sum(split["bytes"] for split in record["splits"].values())
    lines.append(
        f"{stored / tokens:.2f} bytes stored a token, {record['text_bytes'] / tokens:.2f} bytes of text a token, "
        f"{tokens / max(record['cpu_seconds'], 1e-9):,.0f} tokens/s a core"
    )
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s"])
