"""Means, intervals and tests against scipy's own, and values for which they are undefined."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from biphasic.report.statistics import holm, intervals, mean_interval


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 5, 30):
        values = generator.normal(0.8, 0.02, count)
        interval = mean_interval(list(values))
        low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
        assert (interval.mean - interval.half, interval.mean + interval.half) == (
            pytest.approx(low),
            pytest.approx(high),
        )
        assert interval.count == count
    # By hand: 2.776 is t(0.975, 4).
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]).half == pytest.approx(2.776445 * 1.5811388 / 5**0.5)


def test_single_and_equal_values() -> None:
    single = mean_interval([0.5])
    assert (single.mean, single.count) == (0.5, 1) and math.isnan(single.half)
    assert mean_interval([0.1, 0.1, 0.1]).half == pytest.approx(0, abs=1e-15)
    none = mean_interval([])
    assert none.count == 0 and math.isnan(none.mean) and math.isnan(none.half)


def test_intervals_of_groups() -> None:
    table = pd.DataFrame({"model": ["a", "b", "a", "b", "a"], "score": [0.1, 0.5, 0.3, math.nan, 0.7]})
    found = intervals(table.groupby("model").score)
    expected = mean_interval([0.1, 0.3, 0.7])
    assert list(found.loc["a"]) == pytest.approx([expected.mean, expected.half, 3])
    assert found.loc["b", "mean"] == 0.5 and math.isnan(found.loc["b", "half_width"]) and found.loc["b", "count"] == 1


def test_pairs_are_by_seed() -> None:
    generator = np.random.default_rng(1)
    first, noise = generator.normal(0.8, 0.05, 5), generator.normal(0.01, 0.004, 5)
    scores = {seed: float(value) for seed, value in enumerate(first)}
    others = {seed: float(value) for seed, value in zip((4, 3, 2, 1, 0), (first - noise)[::-1], strict=True)}
    others[9] = 0.1  # a seed that only one has
    interval = mean_interval(pd.Series(scores) - pd.Series(others))
    expected = stats.ttest_rel(first, first - noise)
    assert interval.p == pytest.approx(expected.pvalue)
    bounds = expected.confidence_interval(0.95)
    assert interval.half == pytest.approx((bounds.high - bounds.low) / 2)
    assert (interval.mean, interval.count) == (pytest.approx(noise.mean()), 5)
    # Not paired, nothing would be seen.
    assert stats.ttest_ind(first, first - noise).pvalue > 0.5 > 0.05 > expected.pvalue


def difference(first: dict[int, float], second: dict[int, float]) -> tuple[float, float, int, float]:
    return astuple(mean_interval(pd.Series(first) - pd.Series(second)))


def test_p_of_single_and_equal_differences() -> None:
    nan = pytest.approx(math.nan, nan_ok=True)
    assert difference({0: 0.5}, {1: 0.5}) == (nan, nan, 0, nan)
    assert difference({0: 0.5}, {0: 0.25}) == (0.25, nan, 1, nan)
    assert difference({0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7}) == (0, 0, 2, 1)
    assert difference({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}) == (0.25, 0, 2, nan)


def corrected(p: list[float]) -> list[float]:
    return list(holm(pd.Series(p, dtype=float)))


def test_holm() -> None:
    # Holm (1979), by hand: 4 * 0.01, 3 * 0.02 = 0.06, 2 * 0.025 = 0.05 raised to 0.06, and 0.5.
    assert corrected([0.5, 0.01, 0.025, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert corrected([0.9, math.nan, 0.6]) == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert corrected([]) == []
    generator = np.random.default_rng(2)
    for _ in range(50):
        given = generator.uniform(0, 0.3, 7)
        order = np.argsort(given)
        adjusted = np.minimum(1, np.maximum.accumulate(given[order] * np.arange(7, 0, -1)))
        expected = np.empty(7)
        expected[order] = adjusted
        assert corrected(list(given)) == pytest.approx(list(expected))
