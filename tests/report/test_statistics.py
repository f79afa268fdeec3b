"""Means, intervals and tests against scipy's own, and values for which they are undefined."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from biphasic.report.statistics import Difference, Interval, deviation, holm, mean_interval, paired_difference


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 5, 30):
        values = generator.normal(0.8, 0.02, count)
        interval = mean_interval(list(values))
        low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
        assert interval.half is not None
        assert (interval.mean - interval.half, interval.mean + interval.half) == (
            pytest.approx(low),
            pytest.approx(high),
        )
        assert interval.count == count
    # By hand: 2.776 is t(0.975, 4).
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]).half == pytest.approx(2.776445 * 1.5811388 / 5**0.5)


def test_single_and_equal_values() -> None:
    assert mean_interval([0.5]) == Interval(0.5, None, 1)
    assert mean_interval([0.1, 0.1, 0.1]).half == 0
    assert deviation([0.1]) is None
    assert deviation([0.1, 0.3]) == pytest.approx(np.std([0.1, 0.3], ddof=1))
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_pairs_are_by_seed() -> None:
    generator = np.random.default_rng(1)
    first, noise = generator.normal(0.8, 0.05, 5), generator.normal(0.01, 0.004, 5)
    scores = {seed: float(value) for seed, value in enumerate(first)}
    others = {seed: float(value) for seed, value in zip((4, 3, 2, 1, 0), (first - noise)[::-1], strict=True)}
    others[9] = 0.1  # a seed that only one has
    interval = paired_difference(scores, others)
    expected = stats.ttest_rel(first, first - noise)
    assert interval is not None
    assert interval.p == pytest.approx(expected.pvalue)
    bounds = expected.confidence_interval(0.95)
    assert interval.half == pytest.approx((bounds.high - bounds.low) / 2)
    assert (interval.mean, interval.count) == (pytest.approx(noise.mean()), 5)
    # Not paired, nothing would be seen.
    assert stats.ttest_ind(first, first - noise).pvalue > 0.5 > 0.05 > expected.pvalue


def test_p_of_single_and_equal_differences() -> None:
    assert paired_difference({0: 0.5}, {1: 0.5}) is None
    assert paired_difference({0: 0.5}, {0: 0.25}) == Difference(0.25, None, 1, None)
    same = paired_difference({0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7})
    assert same is not None
    assert (same.mean, same.p) == (0, 1)
    shifted = paired_difference({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5})
    assert shifted is not None
    assert (shifted.mean, shifted.p) == (0.25, None)


def test_holm() -> None:
    # Holm (1979), by hand: 4 * 0.01, 3 * 0.02 = 0.06, 2 * 0.025 = 0.05 raised to 0.06, and 0.5.
    assert holm([0.5, 0.01, 0.025, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, None, 0.6]) == [1.0, None, 1.0]
    assert holm([]) == []
    generator = np.random.default_rng(2)
    for _ in range(50):
        given = generator.uniform(0, 0.3, 7)
        order = np.argsort(given)
        adjusted = np.minimum(1, np.maximum.accumulate(given[order] * np.arange(7, 0, -1)))
        expected = np.empty(7)
        expected[order] = adjusted
        assert holm(list(given)) == pytest.approx(list(expected))
