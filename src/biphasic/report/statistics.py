"""Means over seeds, their intervals, and differences that are tested.

With a handful of seeds an interval needs Student's t, and two models are compared seed by seed: the same seed has given both
the same order of examples, so that a part of the noise is shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
SAME = 1e-12
"""Differences that spread less than this, by their standard deviation, are equal but for rounding."""


@dataclass(frozen=True)
class Mean:
    """A mean with its interval: `mean` ± `half`, in the values' unit."""

    mean: float
    half: float | None
    """None for a single value."""
    count: int


@dataclass(frozen=True)
class Difference:
    """What one model scores more than another, over the seeds that both have."""

    mean: float
    half: float | None
    """Of the 95% interval; None for a single seed."""
    p: float | None
    """Two-sided, of the paired t-test; None where it can't be had: a single seed, or equal differences other than 0."""
    count: int


def deviation(values: Sequence[float]) -> float | None:
    """The sample's standard deviation (n - 1), in the values' unit; None for fewer than two; 0 for equal ones."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0  # their mean may be another number, by rounding
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_interval(values: Sequence[float]) -> Mean:
    """Mean and 95% interval: t(0.975, n - 1) standard deviations / sqrt(n).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values have no mean")
    count, spread = len(values), deviation(values)
    mean = math.fsum(values) / count
    if spread is None:
        return Mean(mean, None, count)
    from scipy.stats import t

    return Mean(mean, float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread / math.sqrt(count), count)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """`first` less `second`, by seed, over the seeds in both; None when they share none.

    Differences that are all 0 have p = 1. Equal ones other than 0 have none: two or three seeds that happen to agree to the
    last digit would else be the surest result of the table.
    """
    seeds = sorted(set(first) & set(second))
    if not seeds:
        return None
    values = [first[seed] - second[seed] for seed in seeds]
    found, spread = mean_interval(values), deviation(values)
    if spread is None:
        p = None
    elif spread <= SAME:
        p = 1.0 if abs(found.mean) <= SAME else None
    else:
        from scipy.stats import t

        p = float(2 * t.sf(abs(found.mean) / (spread / math.sqrt(len(values))), len(values) - 1))
    return Difference(found.mean, found.half, p, found.count)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction, in the order given; those that are None stay so and don't count as tests.

    The k-th smallest of m becomes the largest of (m - j + 1) p_j over j ≤ k, at most 1.
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    found: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        found[index] = largest
    return found
