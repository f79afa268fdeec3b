"""Intervals for means over queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> tuple[float, float]:
    """The 95% percentile interval of the mean, over resamples of the queries (Efron, 1979).

    Args:
        values: one score a query; for a difference of two systems, the queries' differences (a paired bootstrap).
        seed: of the resampling.
        resamples: how many.
    """
    scores = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, 500):  # in portions, so that memory stays small with many queries
        count = min(500, resamples - start)
        means[start : start + count] = scores[generator.integers(len(scores), size=(count, len(scores)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
