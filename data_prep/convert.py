"""Convert text to MDS shards of packed rows: `python data_prep/convert.py FILE.yaml [key=value ...] [--plan]`."""

from __future__ import annotations

import argparse
import sys

from biphasic.config.conversion import ConvertConfig, FilesSource
from biphasic.config.errors import ConfigError, UserError
from biphasic.config.load import load


def plan(config: ConvertConfig) -> str:
    """What a conversion will do, from its configuration alone."""
    source, segments = config.source, config.segments
    if isinstance(source, FilesSource):
        text = f"files: {', '.join(source.paths)}"
    else:
        text = ", ".join(filter(None, ["hub dataset " + source.path, source.name, source.split, source.revision]))
    ends = [name for name, wanted in (("BOS before", config.add_bos), ("EOS after", config.add_eos)) if wanted]
    if segments.kind == "single":
        cut = f"one document a row; longer ones {'cut off' if segments.longer == 'truncate' else 'in several rows'}"
    elif segments.kind == "stream":
        longest = config.sequence_length - segments.shortest
        cut = f"documents joined, cut at random lengths of {segments.shortest} to {longest} tokens (seed {config.seed})"
    else:
        cut = f"a segment is a document; best-fit packing among {segments.window:,} waiting ones"
    held = config.validation_fraction
    splits = f"train/ and validation/ ({100 * held:g}% of documents, by id)" if held else "train/ only"
    limit = "all documents" if config.max_documents is None else f"the first {config.max_documents:,} documents"
    limit += "" if config.max_tokens is None else f", until train/ has {config.max_tokens:,} tokens"
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


def _lines(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:<10} {line}" for name, line in lines.items())


def main(arguments: list[str] | None = None) -> int:
    """Convert, or print the plan; returns the exit status."""
    parser = argparse.ArgumentParser(description="Convert text to MDS shards of packed rows.")
    parser.add_argument("file", help="a job: convert YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="instead of what the YAML says")
    parser.add_argument(
        "--plan", action="store_true", help="say what would be done: files, tokens, bytes, hours, peak disk"
    )
    chosen = parser.parse_intermixed_args(arguments)
    try:
        config = load(chosen.file, chosen.overrides)
        if not isinstance(config, ConvertConfig):
            raise UserError(f"{chosen.file}: job: {config.job}: this command needs job: convert")
        if chosen.plan:
            from biphasic.data.estimate import describe, estimate

            print(plan(config))
            print(_lines(describe(estimate(config), config)))
            return 0
        from biphasic.data.convert import convert
        from biphasic.data.progress import summary

        print(summary(config.output, convert(config)))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished tasks are kept; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
