"""Compute how much of each dataset a pretraining run will read, from the datasets' conversion records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from biphasic.config.conversion_record import StreamRecord, split_conversion_path
from biphasic.config.pretrain import PretrainConfig


@dataclass(frozen=True)
class DatasetPlan:
    """The size of a dataset and how much of it the run reads. Unknown values are None.

    Token counts exclude padding.
    """

    key: str
    path: str
    proportion: float
    record: str | None = None
    rows: int | None = None
    tokens: int | None = None
    run_rows: int | None = None
    run_tokens: int | None = None
    epochs: float | None = None


def plan_datasets(
    config: PretrainConfig, batches: int | None, records: Mapping[str, StreamRecord]
) -> tuple[list[DatasetPlan], list[str]]:
    """Return how much a run reads of each dataset, and warnings about repeated data.

    Args:
        config: a checked configuration.
        records: the datasets' conversion records, as far as they are known, by key.
        batches: number of batches in the run if padding counts as tokens; None if it depends on the data.
    """
    streams = config.data.streams
    records = {key: each for key, each in records.items() if each.split.get("rows") and each.split.get("tokens")}
    shares = {key: getattr(stream, "proportion", 1.0) for key, stream in streams.items()}
    epoch_rows = config.data.epoch_rows
    if epoch_rows is None and len(records) == len(streams):
        epoch_rows = sum(record.split["rows"] for record in records.values())
    first_row = config.data.first_row(config.global_batch_size)
    run_rows = _run_rows(config, batches, records, shares, epoch_rows)
    datasets = []
    for key, stream in streams.items():
        rows, path = None if run_rows is None else round(run_rows * shares[key]), stream.remote or stream.local
        dataset = DatasetPlan(key, path, shares[key], run_rows=rows)
        if (record := records.get(key)) is not None:
            dataset = replace(dataset, record=record.folder, rows=record.split["rows"], tokens=record.split["tokens"])
            if rows is not None:
                tokens, epochs = round(rows * record.tokens_per_row), rows / record.split["rows"]
                dataset = replace(dataset, run_tokens=tokens, epochs=epochs)
        datasets.append(dataset)
    warnings = [
        f"{dataset.key} would be repeated: the run takes {dataset.epochs:.3g} epochs of {dataset.path}"
        for dataset in datasets
        if dataset.epochs is not None and dataset.epochs > 1
    ]
    for dataset in datasets:
        if first_row and dataset.rows is not None and dataset.epochs is not None and dataset.epochs <= 1:
            end = first_row * dataset.proportion / dataset.rows + dataset.epochs
            if end > 1:
                message = f"the run begins at row {first_row:,} (data.start_at) and ends in epoch {math.ceil(end)} of"
                warnings.append(f"{dataset.key}: {message} {dataset.path}, so rows from before data.start_at are read")
    if config.data.mix is not None and run_rows is not None and epoch_rows is not None and run_rows > epoch_rows:
        warnings.append(
            f"the run is longer than an epoch of the mix ({epoch_rows:,} rows). Each epoch draws its rows independently, "
            f"so that some rows are repeated before others are read: set data.epoch_rows to {run_rows:,}"
        )
    return datasets, warnings


def describe_datasets(datasets: list[DatasetPlan], about: str) -> list[str]:
    """Return one line of the printed plan for each dataset."""
    lines = []
    for dataset in datasets:
        share = "" if dataset.key == "data.train" else f"{dataset.key.rpartition('.')[2]} {dataset.proportion:.4g}: "
        if dataset.record is None:
            text = f"unknown (no record at {split_conversion_path(dataset.path)[0]})"
        elif dataset.run_tokens is None or dataset.epochs is None:
            text = f"{dataset.tokens:,} tokens in {dataset.rows:,} rows at {dataset.path}"
        else:
            text = f"{about}{dataset.run_tokens:,} tokens, {dataset.epochs:.3g} epochs of {dataset.path}"
        lines.append(f"{share}{text}")
    return lines


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
