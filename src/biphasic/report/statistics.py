"""Compute means over seeds, confidence intervals and paired differences.

Intervals use Student's t distribution, because there are few seeds. Models are compared seed by seed, because the same seed
gives both the same order of examples, so that they share a part of the noise. NaN is an undefined number, such as the
interval of a single value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Differences with a smaller standard deviation are treated as equal, because rounding alone could cause it."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval `mean` ± `half`, in the values' unit."""

    mean: float
    half: float
    count: int
    p: float = math.nan
    """Of a difference, the two-sided p-value of the paired t-test; NaN for fewer than two seeds, and for equal differences
    other than 0."""


def intervals(groups: Any) -> pd.DataFrame:
    """Return `mean`, `half_width` and `count` of each group of values. NaN is not counted.

    The 95% interval is ± t(0.975, n - 1) standard deviations / sqrt(n).

    Args:
        groups: a column of a DataFrame's `groupby`.
    """
    table = groups.agg(["mean", "std", "count"])
    critical = stats.t.ppf((1 + CONFIDENCE) / 2, table["count"] - 1)
    return table.assign(half_width=critical * table["std"] / np.sqrt(table["count"]))[["mean", "half_width", "count"]]


def mean_interval(values: Sequence[float] | pd.Series) -> Interval:
    """Return the mean of at least one value and its 95% interval."""
    [(mean, half, count)] = intervals(pd.Series(values, dtype=float).groupby(lambda _: 0)).to_numpy()
    return Interval(float(mean), float(half), int(count))


def paired_difference(first: pd.Series, second: pd.Series) -> Interval:
    """Return the mean of `first` minus `second` over the seeds in both, which are their index.

    Differences that are all 0 have p = 1. Equal differences other than 0 have no p, because otherwise two or three seeds
    that happen to agree to the last digit would be the most significant result in the table.
    """
    values = (first - second).dropna()
    if not len(values):
        return Interval(math.nan, math.nan, 0)
    interval = mean_interval(values)
    if values.std() > ROUNDING:
        test: Any = stats.ttest_1samp(values, 0)
        return replace(interval, p=float(test.pvalue))
    return replace(interval, p=1.0) if len(values) > 1 and abs(interval.mean) <= ROUNDING else interval


def holm(p: pd.Series) -> pd.Series:
    """Return p-values corrected by Holm's step-down method. NaN stays NaN and isn't counted as a test.

    The k-th smallest of m becomes the largest of (m - j + 1) p_j over j ≤ k, at most 1.
    """
    ordered = p.dropna().sort_values()
    return (ordered * range(len(ordered), 0, -1)).clip(upper=1).cummax().reindex(p.index)
