"""Results of a trial (one fine-tuning). Imports neither PyTorch nor Composer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DownstreamResult:
    """The scores of a trial on one test set, from 0 to 1."""

    task: str
    """The task, which averages count once, by its first result: MNLI's two test sets both belong to `mnli`."""
    name: str
    """The test set, e.g. `mnli-mm`, with the metric if it isn't the first one: `conll2003 f1`."""
    family: str
    metric: str
    """The metric of `validation` and `test`, e.g. `accuracy`. Its learning rate is chosen by it."""
    validation: float | None
    test: float | None
    more: dict[str, dict[str, float]] = field(default_factory=dict)
    """All metrics by split (`validation`, `test`)."""
    data: str = ""
    """The test set's dataset, and `file` the Parquet file with its predictions by example; empty in older records."""
    file: str = ""


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial, with one result for each test set, and its durations (`load`, `train`, `score`, `total`)."""

    results: tuple[DownstreamResult, ...]
    seconds: dict[str, float]
    about: dict[str, Any]
    """Steps, tokens, last loss, parameters, ranks, configuration, host, hardware and versions."""
    predictions: dict[str, bytes] = field(default_factory=dict)
    """Parquet files with the predictions and scores of each example, by name, if a sweep keeps them."""
