"""Convert text to MDS shards of packed rows: `python data_prep/convert.py FILE.yaml [key=value ...] [--plan]`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load
from biphasic.errors import ConfigError, UserError


def plan(config: ConvertConfig) -> str:
    """Return the lines of `--plan` that depend only on the configuration."""
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
    return _lines(lines)


def summary(output: str, record: dict[str, Any]) -> str:
    """Return a finished conversion's counts as text."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {len(split['shards'])} shards, "
        f"{split['bytes'] / 1e6:,.1f} MB"
        for name, split in record["splits"].items()
    ]
    documents = record["documents"]
    remarks = [f"{documents['filtered']:,} left out by filters"] if documents["filtered"] else []
    remarks += [f"{count:,} skipped ({kind})" for kind, count in documents["skipped"].items()]
    remarks += [f"{documents['repeated']:,} with the id of an earlier one"] if documents["repeated"] else []
    if remarks:
        lines.append(f"documents: {documents['read']:,} read, {', '.join(remarks)}")
    lines += [f"left out: {message}" for message in record["source"]["left_out"]]
    tokens = max(sum(split["tokens"] for split in record["splits"].values()), 1)
    stored = sum(split["bytes"] for split in record["splits"].values())
    lines.append(
        f"{stored / tokens:.2f} bytes stored a token, {record['text_bytes'] / tokens:.2f} bytes of text a token, "
        f"{tokens / max(record['cpu_seconds'], 1e-9):,.0f} tokens/s a core"
    )
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s"])


def _lines(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:<10} {line}" for name, line in lines.items())


def main(arguments: list[str] | None = None) -> int:
    """Convert, or print the plan, and return the exit status."""
    parser = argparse.ArgumentParser(description="Convert text to MDS shards of packed rows.")
    parser.add_argument("file", help="a job: convert YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the YAML's keys")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be done: files, tokens, bytes, hours, peak disk"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.file, options.overrides)
        if not isinstance(config, ConvertConfig):
            raise UserError(f"{options.file}: job: {config.job}: this command needs job: convert")
        if options.plan:
            from biphasic.conversion.estimate import estimate

            print(plan(config))
            print(_lines(estimate(config)))
            return 0
        from biphasic.conversion.convert import convert

        print(summary(config.output, convert(config)))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished work units are kept; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
