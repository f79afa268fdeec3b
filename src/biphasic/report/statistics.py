"""Intervals and tests of scores and of differences between models.

There are few seeds, so intervals over seeds use Student's t distribution. Examples are many, so tests over them resample.
NaN means undefined, such as the interval of a single value, and isn't counted as a value.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Values with a smaller standard deviation are treated as equal: rounding alone could cause it."""
RESAMPLES = 10_000
"""Number of resamples of an interval and of a test over examples."""
_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% confidence interval `mean` ± `half`, in the values' unit."""

    mean: float
    half: float
    count: int
    p: float
    """Two-sided p-value of the t-test for a mean of 0; NaN for fewer than two values, or equal values other than 0."""


def intervals(groups: Any) -> pd.DataFrame:
    """Return `mean`, `half_width` (of the 95% interval), `count` and `p` for each group of `groups`, a grouped column.

    `p` is that of the two-sided t-test for a mean of 0. Values that are all 0 have p = 1. Equal values other than 0 have
    no p: otherwise two or three seeds that agree to the last digit would give the most significant result in the table.
    """
    table = groups.agg(["mean", "sem", "count"])
    mean, sem, freedom = table["mean"], table["sem"], table["count"] - 1
    p = pd.Series(2 * stdtr(freedom, -(mean / sem).abs()), table.index)
    p = p.mask(sem * table["count"] ** 0.5 <= ROUNDING, (mean.abs() <= ROUNDING).map({True: 1.0, False: math.nan}))
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * sem
    return pd.DataFrame({"mean": mean, "half_width": half, "count": table["count"], "p": p})


def mean_interval(values: Iterable[float]) -> Interval:
    """Return the mean of values, such as the differences between two models by seed, and its 95% interval and p."""
    series = pd.Series([*values, math.nan], dtype=float)  # so that no values are a group too
    [(mean, half, count, p)] = intervals(series.groupby(lambda _: 0)).to_numpy()
    return Interval(float(mean), float(half), int(count), float(p))


def holm(p: pd.Series) -> pd.Series:
    """Return p-values corrected by Holm's step-down method. NaN isn't counted as a test."""
    ordered = p.dropna().sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).clip(upper=1).cummax().reindex(p.index)


class ExampleValues(NamedTuple):
    """The values that a metric needs of each example, fp64 [examples, values].

    `score` maps values [..., examples, values] to the metric [...]. `quality` [examples] says how good each prediction
    is: its own score, or minus its errors.
    """

    values: np.ndarray
    score: Callable[[np.ndarray], np.ndarray]
    quality: np.ndarray


def mean_score(values: np.ndarray) -> np.ndarray:
    """Return the mean of the examples' first value."""
    return values[..., 0].mean(-1)


def paired_test(first: Sequence[ExampleValues], second: Sequence[ExampleValues]) -> dict[str, Any]:
    """Return the scores `a` and `b` of two models, given by seed, their `difference` (b - a), its `interval` and its `p`.

    The 95% interval is a percentile bootstrap over the examples, which are the same for both models and all seeds. `p`
    is of a two-sided randomization test, which exchanges the models' predictions for random examples.
    """
    pooled = np.stack([np.concatenate([a.values, b.values]) for a, b in zip(first, second, strict=True)])
    score, count = first[0].score, len(first[0].values)
    if score is mean_score:  # so the seeds can be averaged before the resampling
        pooled = pooled.mean(0, keepdims=True)

    def scores(rows: np.ndarray) -> np.ndarray:
        return score(pooled[:, rows.astype(int)]).mean(0)

    def difference(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return scores(np.moveaxis(b, axis, -1)) - scores(np.moveaxis(a, axis, -1))

    from scipy import stats  # it takes a second to import, and reports don't need it

    rows = np.arange(count), np.arange(count, 2 * count)
    a, b = (float(scores(each)) for each in rows)
    low, high, p = b - a, b - a, 1.0
    if count > 1:
        batch = max(_VALUES_AT_ONCE // pooled.size, 1)
        options: Any = {"n_resamples": RESAMPLES, "vectorized": True, "batch": batch, "rng": 0}
        low, high = stats.bootstrap(rows, difference, paired=True, method="percentile", **options).confidence_interval
        p = stats.permutation_test(rows, difference, permutation_type="samples", **options).pvalue
    return {"a": a, "b": b, "difference": b - a, "interval": (float(low), float(high)), "p": float(p)}
