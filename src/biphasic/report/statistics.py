"""Compute means over seeds, confidence intervals and corrected p-values.

There are few seeds, so intervals use Student's t distribution. A seed gives all models the same order of examples and
thus some common noise, so models are compared seed by seed. NaN means undefined, such as the interval of a single
value, and isn't counted as a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Values with a smaller standard deviation are treated as equal: rounding alone could cause it."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% confidence interval `mean` ± `half`, in the values' unit."""

    mean: float
    half: float
    count: int
    p: float
    """Two-sided p-value of the t-test for a mean of 0; NaN for fewer than two values, or equal values other than 0."""


def intervals(groups: Any) -> pd.DataFrame:
    """Return `mean`, `half_width` (of the 95% interval) and `count` for each group of `groups`, a grouped column."""
    table = groups.agg(["mean", "sem", "count"])
    critical = stats.t.ppf((1 + CONFIDENCE) / 2, table["count"] - 1)
    return table.assign(half_width=critical * table["sem"])[["mean", "half_width", "count"]]


def mean_interval(values: Sequence[float] | pd.Series) -> Interval:
    """Return the mean of values, such as the differences between two models by seed, and its 95% interval.

    Values that are all 0 have p = 1. Equal values other than 0 have no p: otherwise two or three seeds that agree to
    the last digit would give the most significant result in the table.
    """
    series = pd.Series(values, dtype=float).dropna()
    if series.empty:
        return Interval(math.nan, math.nan, 0, math.nan)
    [(mean, half, count)] = intervals(series.groupby(lambda _: 0)).to_numpy()
    p = math.nan
    if series.std() > ROUNDING:
        p = float(stats.ttest_1samp(series, 0).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    elif count > 1 and abs(mean) <= ROUNDING:
        p = 1.0
    return Interval(float(mean), float(half), int(count), p)


def holm(p: pd.Series) -> pd.Series:
    """Return p-values corrected by Holm's step-down method. NaN isn't counted as a test."""
    ordered = p.dropna().sort_values()
    return (ordered * range(len(ordered), 0, -1)).clip(upper=1).cummax().reindex(p.index)
