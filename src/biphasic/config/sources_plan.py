"""How much of each dataset a pretraining run will see, from the records of their conversions."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from threading import Thread

from biphasic.config.records import FoundRecord, parent_of, record_of
from biphasic.config.schema import PretrainConfig, StreamConfig

_SECONDS = 5.0
"""Longest wait for records: a plan is read while somebody waits, and a bucket may not answer."""


@dataclass(frozen=True)
class SourcePlan:
    """One dataset: what it holds, and what the run takes of it. None where its record can't be read.

    Tokens are real ones, padding not counted.
    """

    key: str
    place: str
    proportion: float
    record: str | None
    rows: int | None
    tokens: int | None
    run_rows: int | None
    run_tokens: int | None
    epochs: float | None


def plan_sources(config: PretrainConfig, batches: int | None) -> tuple[list[SourcePlan], list[str]]:
    """What a run takes of each dataset, and a warning for each that would come more than once.

    Args:
        config: a checked configuration.
        batches: of the run, where the configuration alone tells, as if every position were a token.
    """
    streams = config.data.streams
    found = _records(streams)
    shares = {key: getattr(stream, "proportion", 1.0) for key, stream in streams.items()}
    known = all(found.values())
    epoch = _epoch_rows(config, found) if known or config.data.epoch_rows else None
    rows = _rows_of_run(config, batches, found if known else None, shares, epoch)
    sources = [_source(key, stream, shares[key], found[key], rows) for key, stream in streams.items()]
    return sources, _warnings(sources, config, rows, epoch)


def describe_sources(sources: list[SourcePlan], about: str) -> list[str]:
    """The plan's lines, one for each dataset."""
    lines = []
    for source in sources:
        share = "" if source.key == "data.train" else f"{source.key.rpartition('.')[2]} {source.proportion:.4g}: "
        if source.record is None:
            said = f"unknown (no record at {parent_of(source.place)[0]})"
        elif source.run_tokens is None or source.epochs is None:
            said = f"{source.tokens:,} tokens in {source.rows:,} rows at {source.place}"
        else:
            said = f"{about}{source.run_tokens:,} tokens, {source.epochs:.3g} epochs of {source.place}"
        lines.append(f"  data           {share}{said}")
    return lines


def _records(streams: dict[str, StreamConfig]) -> dict[str, FoundRecord | None]:
    """Each stream's record, all read at once, or None where there is none in time."""
    found: dict[str, FoundRecord | None] = dict.fromkeys(streams)

    def read(key: str) -> None:
        try:
            record = record_of(streams[key])
            if record is not None and record.split["rows"] > 0 and record.split["tokens"] > 0:
                found[key] = record
        except Exception:
            return  # Whatever a bucket's client raises, the plan says "unknown".

    # Daemons, so that a bucket that doesn't answer keeps neither the plan nor the process waiting.
    readers = [Thread(target=read, args=[key], daemon=True) for key in streams]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + _SECONDS
    for reader in readers:
        reader.join(max(0, deadline - time.monotonic()))
    return dict(found)


def _epoch_rows(config: PretrainConfig, found: dict[str, FoundRecord | None]) -> int:
    return config.data.epoch_rows or sum(record.split["rows"] for record in found.values() if record)


def _rows_of_run(
    config: PretrainConfig,
    batches: int | None,
    found: dict[str, FoundRecord | None] | None,
    shares: dict[str, float],
    epoch: int | None,
) -> int | None:
    whole, size = config.max_duration, config.global_batch_size
    if whole.unit == "ep":
        return None if epoch is None else int(whole.value) * (epoch // size) * size
    if whole.unit == "tok" and found is not None:
        in_row = sum(shares[key] * _fill(record) for key, record in found.items() if record)
        return math.ceil(round(whole.value / (in_row * size), 6)) * size
    return None if batches is None else batches * size


def _fill(record: FoundRecord) -> float:
    """Real tokens in an average row."""
    return record.split["tokens"] / record.split["rows"]


def _source(
    key: str, stream: StreamConfig, share: float, found: FoundRecord | None, run_rows: int | None
) -> SourcePlan:
    rows = None if run_rows is None else round(run_rows * share)
    return SourcePlan(
        key=key,
        place=stream.remote or stream.local,
        proportion=share,
        record=None if found is None else found.folder,
        rows=None if found is None else found.split["rows"],
        tokens=None if found is None else found.split["tokens"],
        run_rows=rows,
        run_tokens=None if found is None or rows is None else round(rows * _fill(found)),
        epochs=None if found is None or rows is None else rows / found.split["rows"],
    )


def _warnings(sources: list[SourcePlan], config: PretrainConfig, rows: int | None, epoch: int | None) -> list[str]:
    found = [
        f"{source.key} would be repeated: the run takes {source.epochs:.3g} epochs of {source.place}"
        for source in sources
        if source.epochs is not None and source.epochs > 1
    ]
    if config.data.mix is not None and rows is not None and epoch is not None and rows > epoch:
        found.append(
            f"the run is longer than an epoch of the mix ({epoch:,} rows), and each epoch draws its rows anew, so that "
            f"some come again before others have come: set data.epoch_rows to {rows:,}"
        )
    return found
