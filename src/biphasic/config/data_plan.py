"""Plan how much a pretraining run reads of each dataset, and warn if it would read some of it again."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from biphasic.config.phase_inputs import PhaseInputs, phase_key, sources
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streams import StreamRecord, split_conversion_path


def plan_datasets(
    config: PretrainConfig, batches: int | None, rows: Mapping[int, int], records: Mapping[str, StreamRecord]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return how much a run reads of each dataset, as numbers and as text, and warnings about repeated data.

    Token counts exclude padding; unknown values are None. `batches` is the length of the run if padding counts as
    tokens, or None if it depends on the data, and `rows` those of each of several data.
    """
    records = {key: each for key, each in records.items() if each.split.get("rows") and each.split.get("tokens")}
    datasets, lines, warnings = list[dict[str, Any]](), list[str](), list[str]()
    first_row = config.data.first_row(config.global_batch_size)
    if first_row:
        lines.append(f"begins at row {first_row:,} of the order (data.start_at: {config.data.start_at})")
    for each in sources(config.inputs):
        known, epoch_rows, tokens_per_row = {key: records[key] for key in each.streams if key in records}, None, None
        if len(known) == len(each.streams):
            epoch_rows = each.data.epoch_rows or sum(record.split["rows"] for record in known.values())
            tokens_per_row = sum((each.streams[key].proportion or 1.0) * known[key].tokens_per_row for key in known)
        of_source = rows[each.source] if len(rows) > 1 else _run_rows(config, batches, epoch_rows, tokens_per_row)
        of_streams, about = _plan_streams(each, of_source, known), config.max_duration.unit == "tok"
        for dataset in of_streams:
            datasets.append(dataset)
            lines.append(_dataset_line(dataset, "about " * about, each.data.mix is not None))
            warnings += _repetitions(config, dataset, 0 if each.source else first_row)
        if each.data.mix is not None and of_source is not None and epoch_rows is not None and of_source > epoch_rows:
            above = f"{phase_key(each.source)}." * bool(each.source)
            warnings.append(
                f"the run is longer than an epoch of the mix ({epoch_rows:,} rows). Each epoch draws its rows "
                "independently, so that some rows are repeated before others are read: set "
                f"{above}data.epoch_rows to {of_source:,}"
            )
    return datasets, lines, warnings


def _plan_streams(source: PhaseInputs, rows: int | None, records: dict[str, StreamRecord]) -> Iterator[dict[str, Any]]:
    """Yield how much a run reads of each stream of a source, of which it reads `rows` rows."""
    for key, stream in source.streams.items():
        path, record, share = stream.remote or stream.local, records.get(key), stream.proportion or 1.0
        dataset = {"key": key, "path": path, "proportion": share, "record": None, "rows": None, "tokens": None}
        dataset["run_rows"] = own = None if rows is None else round(rows * share)
        dataset |= {"run_tokens": None, "epochs": None}
        if record is not None:
            stored = record.split["rows"]
            dataset |= {"record": record.folder, "rows": stored, "tokens": record.split["tokens"]}
            if own is not None:
                dataset |= {"run_tokens": round(own * record.tokens_per_row), "epochs": own / stored}
        yield dataset


def _dataset_line(dataset: dict[str, Any], about: str, is_mixed: bool) -> str:
    key, path = dataset["key"], dataset["path"]
    name = f"{key.rpartition('.')[2]} {dataset['proportion']:.4g}: " if is_mixed else ""
    name = f"from {key.partition('.data.')[0]} on: {name}" if not key.startswith("data.") else name
    if dataset["record"] is None:
        return f"{name}unknown (no record at {split_conversion_path(path)[0]})"
    if dataset["epochs"] is None:
        return f"{name}{dataset['tokens']:,} tokens in {dataset['rows']:,} rows at {path}"
    return f"{name}{about}{dataset['run_tokens']:,} tokens, {dataset['epochs']:.3g} epochs of {path}"


def _repetitions(config: PretrainConfig, dataset: dict[str, Any], first_row: int) -> Iterator[str]:
    key, path, epochs = dataset["key"], dataset["path"], dataset["epochs"]
    if epochs is None:
        return
    if epochs > 1:
        yield f"{key} would be repeated: the run takes {epochs:.3g} epochs of {path}"
    elif first_row and (end := first_row * dataset["proportion"] / dataset["rows"] + epochs) > 1:
        message = f"the run begins at row {first_row:,} (data.start_at) and ends in epoch {math.ceil(end)} of"
        yield f"{key}: {message} {path}, so rows from before data.start_at are read"


def rows_by_source(phases: list[dict[str, Any]], inputs: list[PhaseInputs]) -> Counter[int]:
    """Return how many rows of each data the planned phases read, by the data's first phase; nothing if it's unknown."""
    rows = Counter[int]()
    for phase, own in zip(phases, inputs, strict=True):
        if phase["tokens"] is None:
            return Counter()
        rows[own.source] += (phase["last_batch"] + 1 - phase["first_batch"]) * own.rows
    return rows


def _run_rows(
    config: PretrainConfig, batches: int | None, epoch_rows: int | None, tokens_per_row: float | None
) -> int | None:
    """Return how many rows a run reads whose phases all read the same data; None if that is unknown."""
    end, batch_rows = config.max_duration, config.global_batch_size
    if end.unit == "ep":
        if epoch_rows is None or epoch_rows < batch_rows:
            return None
        rows = epoch_rows // batch_rows * batch_rows
        return int(end.value) * rows - config.data.first_row(batch_rows) % rows
    if end.unit == "tok" and tokens_per_row is not None:
        return math.ceil(round(end.value / (tokens_per_row * batch_rows), 6)) * batch_rows
    return None if batches is None else config.batch_shapes.progress(batches).rows
