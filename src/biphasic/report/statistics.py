"""Compute means over seeds, confidence intervals and paired differences.

Intervals use Student's t distribution, because there are few seeds. Models are compared seed by seed, because the same seed
gives both the same order of examples, so that they share a part of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Differences with a smaller standard deviation are treated as equal, because rounding alone could cause it."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval `mean` ± `half`, in the values' unit."""

    mean: float
    half: float | None
    """Half of the interval's width; None for a single value."""
    count: int


@dataclass(frozen=True)
class Difference(Interval):
    """The mean of one model's scores minus another's, over the seeds that both have."""

    p: float | None
    """Two-sided p-value of the paired t-test; None for a single seed, and for equal differences other than 0."""


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), in the values' unit; None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95% interval: ± t(0.975, n - 1) standard deviations / sqrt(n).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the mean of no values is undefined")
    spread, count = deviation(values), len(values)
    if spread is None:
        return Interval(values[0], None, count)
    from scipy.stats import t

    return Interval(fmean(values), float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread / math.sqrt(count), count)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Return the mean of `first` minus `second` over the seeds in both; None if they share no seed.

    Differences that are all 0 have p = 1. Equal differences other than 0 have no p, because otherwise two or three seeds
    that happen to agree to the last digit would be the most significant result in the table.
    """
    values = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if not values:
        return None
    interval, spread, p = mean_interval(values), deviation(values), None
    if spread is not None and spread > ROUNDING:
        from scipy.stats import ttest_1samp

        p = float(ttest_1samp(values, 0).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    elif spread is not None and abs(interval.mean) <= ROUNDING:
        p = 1.0
    return Difference(interval.mean, interval.half, interval.count, p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected by Holm's step-down method, in the given order. None stays None and isn't counted as a test.

    The k-th smallest of m becomes the largest of (m - j + 1) p_j over j ≤ k, at most 1.
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[index] = largest
    return corrected
