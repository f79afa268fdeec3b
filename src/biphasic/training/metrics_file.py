"""Read the metrics that a run writes as JSON lines, and the scores along it. Imports neither torch nor Composer."""

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from biphasic.grouping import mapped_ahead
from biphasic.storage import Store

SCORES = "scores"
"""Folder with the scores of a run's checkpoints (`biphasic watch`), where the run saves."""
_TRAINED = "loss/train/total"
"""A key in the line of every trained batch; lines of validations don't have it."""


def parse_metrics(text: str) -> list[dict[str, Any]]:
    """Return the metrics of each batch, in order, from the content of a run's `metrics.jsonl`.

    If several attempts have trained a batch, the last one's metrics are returned, and none of later batches that only an
    earlier attempt has trained: such a run began again, perhaps with another length. Incomplete lines and those of others,
    without a batch, are skipped.
    """
    batches, newest = dict[int, dict[str, Any]](), 0
    for entry in _entries(text.splitlines()):
        if _TRAINED in entry:
            if entry["batch"] < newest:
                batches = {batch: metrics for batch, metrics in batches.items() if batch < entry["batch"]}
            newest = entry["batch"]
        # A validation's line is merged into its batch's, which keeps its time. A batch trained again replaces both.
        previous = {} if _TRAINED in entry else batches.get(entry["batch"], {})
        batches[entry["batch"]] = {**previous, **entry, **{key: previous[key] for key in previous.keys() & {"time"}}}
    return [batches[batch] for batch in sorted(batches)]


def read_columns(path: Path, chosen: re.Pattern[str]) -> dict[str, Any]:
    """Return the metrics whose keys match, of each batch as `parse_metrics` does: arrays by key, fp64, and `batch`, int64.

    A missing value is NaN. The file is read line by line, so only the arrays take memory.
    """
    batches, columns, seen, newest = array("q"), dict[str, Any](), set[str](), 0
    with path.open("rb") as lines:
        for entry in _entries(lines):
            batch, at, is_trained = entry["batch"], bisect_left(batches, entry["batch"]), _TRAINED in entry
            if is_trained and batch < newest:
                for column in (batches, *columns.values()):
                    del column[at:]
            newest = batch if is_trained else newest
            for key in entry.keys() - seen:
                columns |= {key: array("d", [math.nan]) * len(batches)} if chosen.fullmatch(key) else {}
                seen.add(key)
            if is_new := batch not in batches[at : at + 1]:
                batches.insert(at, batch)
            for key, column in columns.items():
                value = entry[key] if isinstance(entry.get(key), int | float) else math.nan
                if is_new:
                    column.insert(at, value)
                elif is_trained or key in entry:
                    column[at] = value
    return {name: np.array(column) for name, column in {"batch": batches, **columns}.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of each batch from a `metrics.jsonl`, as `parse_metrics` does."""
    return parse_metrics(path.read_text(encoding="utf-8"))


def read_scores(folder: Store) -> list[dict[str, Any]]:
    """Read the scores of a run's checkpoints from the place where it saves, by batch. Raises an OSError."""
    names = [name for name in folder.list(SCORES) if name.endswith(".json")]
    return sorted(map(json.loads, mapped_ahead(folder.read, names, 16)), key=lambda record: record["batch"])


def _entries(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):  # it may end within a character
            entry = from_json(line)  # three times as fast as Python's
            batch = entry.get("batch") if isinstance(entry, dict) else None
            # Tables that were written back have 3.0, and NaN where a line had no batch.
            if isinstance(batch, int | float) and abs(batch) < 2**53 and batch == int(batch):
                entry["batch"] = int(batch)
                yield entry
