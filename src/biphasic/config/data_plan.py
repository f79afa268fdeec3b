"""Compute how much of each dataset a pretraining run will read, from the datasets' conversion records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from biphasic.config.conversion_record import StreamRecord, split_conversion_path
from biphasic.config.pretrain import PretrainConfig


def plan_datasets(
    config: PretrainConfig, batches: int | None, records: Mapping[str, StreamRecord]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return how much a run reads of each dataset, the same as text, and warnings about repeated data.

    Token counts exclude padding, and unknown values are None.

    Args:
        config: a checked configuration.
        batches: number of batches in the run if padding counts as tokens; None if it depends on the data.
        records: the datasets' conversion records, as far as they are known, by key.
    """
    streams, first_row = config.data.streams, config.data.first_row(config.global_batch_size)
    records = {key: each for key, each in records.items() if each.split.get("rows") and each.split.get("tokens")}
    shares = {key: getattr(stream, "proportion", 1.0) for key, stream in streams.items()}
    epoch_rows = config.data.epoch_rows
    if epoch_rows is None and len(records) == len(streams):
        epoch_rows = sum(record.split["rows"] for record in records.values())
    run_rows = _run_rows(config, batches, records, shares, epoch_rows)
    about = "about " if config.max_duration.unit == "tok" else ""
    datasets, lines, warnings = list[dict[str, Any]](), list[str](), list[str]()
    if first_row:
        lines.append(f"begins at row {first_row:,} of the order (data.start_at: {config.data.start_at})")
    for key, stream in streams.items():
        share, path, record = shares[key], stream.remote or stream.local, records.get(key)
        name = "" if key == "data.train" else f"{key.rpartition('.')[2]} {share:.4g}: "
        dataset = {"key": key, "path": path, "proportion": share, "record": None, "rows": None, "tokens": None}
        dataset["run_rows"] = rows = None if run_rows is None else round(run_rows * share)
        dataset |= {"run_tokens": None, "epochs": None}
        datasets.append(dataset)
        if record is None:
            lines.append(f"{name}unknown (no record at {split_conversion_path(path)[0]})")
            continue
        stored_rows, stored_tokens = record.split["rows"], record.split["tokens"]
        dataset |= {"record": record.folder, "rows": stored_rows, "tokens": stored_tokens}
        if rows is None:
            lines.append(f"{name}{stored_tokens:,} tokens in {stored_rows:,} rows at {path}")
            continue
        tokens, epochs = round(rows * record.tokens_per_row), rows / stored_rows
        dataset |= {"run_tokens": tokens, "epochs": epochs}
        lines.append(f"{name}{about}{tokens:,} tokens, {epochs:.3g} epochs of {path}")
        if epochs > 1:
            warnings.append(f"{key} would be repeated: the run takes {epochs:.3g} epochs of {path}")
        elif first_row and (end := first_row * share / stored_rows + epochs) > 1:
            message = f"the run begins at row {first_row:,} (data.start_at) and ends in epoch {math.ceil(end)} of"
            warnings.append(f"{key}: {message} {path}, so rows from before data.start_at are read")
    if config.data.mix is not None and run_rows is not None and epoch_rows is not None and run_rows > epoch_rows:
        warnings.append(
            f"the run is longer than an epoch of the mix ({epoch_rows:,} rows). Each epoch draws its rows independently, "
            f"so that some rows are repeated before others are read: set data.epoch_rows to {run_rows:,}"
        )
    return datasets, lines, warnings


def _run_rows(
    config: PretrainConfig,
    batches: int | None,
    records: Mapping[str, StreamRecord],
    shares: dict[str, float],
    epoch_rows: int | None,
) -> int | None:
    end, batch_rows = config.max_duration, config.global_batch_size
    if end.unit == "ep":
        if epoch_rows is None or epoch_rows < batch_rows:
            return None
        rows = epoch_rows // batch_rows * batch_rows
        return int(end.value) * rows - config.data.first_row(batch_rows) % rows
    if end.unit == "tok" and len(records) == len(shares):
        tokens_per_row = sum(shares[key] * record.tokens_per_row for key, record in records.items())
        return math.ceil(round(end.value / (tokens_per_row * batch_rows), 6)) * batch_rows
    return None if batches is None else batches * batch_rows
