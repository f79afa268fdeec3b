"""Compare a pretraining run with the records of the conversions that it reads, in the run and in its plan."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphasic.config.model import architecture_of
from biphasic.config.phase_inputs import PhaseInputs, sources
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.same_vocabulary import vocabulary_problem
from biphasic.data.streams import (
    CONVERSION_RECORD,
    CONVERSION_STARTED,
    INDEX,
    RowStream,
    StreamRecord,
    opened_streams,
    read_conversions,
    read_index,
    read_stream_record,
)
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from biphasic.storage import is_folder, join
from biphasic.storage.hub import is_local_path, is_made_by_jobs

Conversions = Mapping[str, StreamRecord]
_MAX_UNUSED = 0.1
"""Unused share of a model's vocabulary that gives no warning, because sizes are often rounded up."""


@dataclass
class RowChecks:
    """What a plan reports about rows and tokenizer: what stops the run, what has to be made first, and likely mistakes.

    `tokenizer` is the run's, if that is a local folder.
    """

    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tokenizer: Tokenizer | None = field(default=None, compare=False)


def row_problems(config: PretrainConfig, conversions: Conversions, tokenizer: Tokenizer | None) -> list[str]:
    """Return why the run can't read the rows of conversions: another tokenizer (unless None) or sequence length."""
    problems = []
    lengths = config.row_lengths
    for key, conversion in conversions.items():
        sha256, length = conversion.record["tokenizer"]["sha256"], conversion.record["sequence_length"]
        converted = f"{key}, {conversion.folder}, was converted with"
        if tokenizer is not None and sha256 != tokenizer.sha256:
            hashes = f"(sha256 {tokenizer.sha256[:12]} against {sha256[:12]})"
            advice = f"use {join(conversion.folder, 'tokenizer')}"
            problems.append(f"tokenizer: {config.tokenizer} is not the one that {converted} {hashes}: {advice}")
        if length != lengths[key]:
            own = f"{key.partition('data.')[0]}data.sequence_length is {lengths[key]}"
            problems.append(f"{own}, but {converted} sequence_length: {length}")
    return problems


def bos_warning(place: str, conversions: Conversions) -> str | None:
    """Return a warning if the tokenizer of `init_from` puts BOS before each text, and converted rows have none."""
    without = [each.folder for each in conversions.values() if not each.record.get("config", {}).get("add_bos")]
    if not without or Path(place).is_file() or Path(place, ".metadata").is_file():
        return None  # a checkpoint continues on rows such as its own
    with suppress(UserError):
        tokenizer = load_tokenizer(place)
        if tokenizer.puts_bos:
            name = tokenizer.tokenizer.id_to_token(tokenizer.require("bos"))
            problem = f"its tokenizer puts {name} (BOS) before each text, and the rows of {without[0]} have none"
            advice = "if the model was trained with it, convert the text with add_bos=true"
            return f"model.init_from {place}: {problem}: {advice}"
    return None


def initial_vocabulary_problem(config: PretrainConfig, tokenizer: Tokenizer | None) -> str | None:
    """Return why the model in the local folder `init_from` doesn't fit the run's tokenizer; None also if one isn't known."""
    source, rebuild = config.model.init_from, config.model.new_vocabulary is not None
    # Checkpoints and runs name their tokenizer in files that need torch.
    if source is not None and tokenizer is not None and Path(source, "config.json").is_file():
        with suppress(UserError):
            return vocabulary_problem(source, load_tokenizer(source), tokenizer, rebuild=rebuild)
    return None


def check_rows(config: PretrainConfig) -> RowChecks:
    """Check a run's rows and tokenizer for its plan. A tokenizer in a bucket or on the hub is not downloaded.

    Raises a UserError if a folder above a local path may not be entered.
    """
    checks, tokenizer = RowChecks(), None

    def add_missing(message: str, is_made: bool) -> None:
        (checks.missing if is_made else checks.problems).append(message)

    if is_folder(config.tokenizer):
        try:
            tokenizer = load_tokenizer(config.tokenizer)
        except UserError as error:
            checks.problems.append(str(error))
    elif is_local_path(config.tokenizer):
        add_missing(f"tokenizer {config.tokenizer}: there is no such folder", is_made_by_jobs(config.tokenizer))
    for key, stream in config.splits.items():
        split = Path(stream.local)
        if stream.remote is None and not (is_folder(stream.local) and os.path.isfile(split / INDEX)):
            reason = f"has no {INDEX}: expected a split of a finished conversion"
            is_converted = (split.parent / CONVERSION_RECORD).is_file()
            is_started = (split.parent / CONVERSION_STARTED).is_file()
            add_missing(
                f"{key}.local {split}: {reason if split.is_dir() else 'there is no such folder'}",
                is_started or (not is_converted and is_made_by_jobs(stream.local)),
            )
    source = config.model.init_from
    if source is not None and is_local_path(source) and not os.path.exists(source):
        add_missing(f"model.init_from {source}: there is no such checkpoint or folder", is_made_by_jobs(source))
    conversions = {key: each for key, each in read_conversions(config.streams).items() if "tokenizer" in each.record}
    checks.problems += row_problems(config, conversions, tokenizer)
    if source is not None and is_folder(source) and (warning := bos_warning(source, conversions)):
        checks.warnings.append(warning)
    checks.tokenizer = tokenizer
    checks.warnings += opened_streams(config.splits)[1]
    checks.problems += stored_row_problems(config.splits, config.row_lengths, tokenizer, first_shards=False)
    checks.problems += epoch_problems(config, conversions)
    architecture = architecture_of(config.model)
    sizes = [conversion.record["tokenizer"]["vocab_size"] for conversion in conversions.values()]
    sizes += [] if tokenizer is None else [tokenizer.vocab_size]
    if architecture is not None and sizes:
        rows, tokens = architecture.vocab_size, max(sizes)
        if tokens > rows:
            checks.problems.append(f"model.vocab_size is {rows:,}, but the tokenizer has {tokens:,} tokens")
        elif rows > tokens * (1 + _MAX_UNUSED):
            unused = f"the other rows of embedding and head are never used (expected {tokens:,}, or a little more)"
            checks.warnings.append(f"model.vocab_size is {rows:,}, but the tokenizer has only {tokens:,} tokens: {unused}")
    return checks


def epoch_problems(config: PretrainConfig, conversions: Conversions) -> Iterator[str]:
    """Yield which data have fewer rows in an epoch than a global batch, where their records or indexes can be read."""

    def rows_of(key: str, stream: RowStream) -> int:
        if key in conversions:
            return conversions[key].split["rows"]
        return sum(shard["samples"] for shard in read_index(stream.remote or stream.local)["shards"])

    for each in sources(config.inputs):
        with suppress(UserError, LookupError, TypeError):
            rows = each.data.epoch_rows or sum(rows_of(*item) for item in each.streams.items())
            if rows < (largest := max(own.rows for own in config.inputs if own.source == each.source)):
                yield f"{', '.join(each.streams)}: an epoch has {rows:,} rows, fewer than a global batch ({largest:,})"


def stored_row_problems(
    streams: Mapping[str, RowStream], lengths: Mapping[str, int], tokenizer: Tokenizer | None, *, first_shards: bool
) -> list[str]:
    """Return why rows of `lengths` tokens, by key, can't be read from the streams: by columns, or others' first shards.

    Conversions with a record are left out, and datasets whose index can't be read: other checks report those.
    """
    problems = []
    for key, stream in streams.items():
        dataset = stream.remote or stream.local
        with suppress(UserError, LookupError, TypeError):
            index = read_index(dataset)
            shard = index["shards"][0]
            if read_stream_record(stream) is not None:
                continue
            # Here, because a plan of conversions doesn't need numpy, whose import takes a tenth of a second.
            from biphasic.data.mds_reader import row_reader, rows_of_shard

            try:
                read = row_reader(key, stream, index, lengths[key], tokenizer)
                if first_shards and "lengths" not in shard["column_names"]:
                    for row in rows_of_shard(dataset, shard, range(shard["samples"])):
                        read(row)
            except UserError as error:
                problems.append(str(error))
    return problems


def conversion_record(config: PretrainConfig, tokenizer: Tokenizer, conversions: Conversions) -> dict[str, Any]:
    """Return how the training data was converted, for the run record; empty if no stream has a conversion record.

    Raises a UserError if a stream was converted with another tokenizer or sequence length.
    """
    if problems := row_problems(config, conversions, tokenizer):
        raise UserError("\n".join(problems))
    if not conversions:
        return {}
    first, *later = (_data_record(each, conversions) for each in sources(config.inputs))
    record = {"tokenizer_sha256": tokenizer.sha256, **first}
    if any(conversion.record.get("config", {}).get("add_bos") for conversion in conversions.values()):
        record["add_bos"] = True
    return {**record, "later": later} if later else record


def _data_record(inputs: PhaseInputs, conversions: Conversions) -> dict[str, Any]:
    """Return source and size of a phase's data, as far as its streams have records."""
    streams: dict[str, dict[str, Any]] = {}
    for key in filter(conversions.__contains__, inputs.streams):
        conversion = conversions[key]
        record = conversion.record
        counts = {name: conversion.split[name] for name in ("tokens", "rows", "documents") if name in conversion.split}
        source, commit = record.get("config", {}).get("source"), record.get("source", {}).get("commit")
        if isinstance(source, dict) and commit is not None:
            # The YAML may name a branch, which may have moved since the conversion.
            source = {**source, "revision": commit}
        streams[key.rpartition(".")[2]] = {"source": source, **counts}
    if inputs.data.mix is None or not streams:
        return streams.get("train", {})
    shares = [f"{name} ({inputs.data.mix[name].proportion:.4g})" for name in sorted(streams)]
    counted = set.intersection(*(set(counts) for counts in streams.values())) - {"source"}
    return {
        "source": f"a mix of {', '.join(shares)}",
        **{name: sum(counts[name] for counts in streams.values()) for name in sorted(counted)},
        "mix": streams,
    }
