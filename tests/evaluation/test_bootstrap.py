"""Bootstrap intervals."""

from __future__ import annotations

import numpy as np

from biphasic.evaluation.bootstrap import bootstrap_interval


def test_close_to_the_normal_interval_of_a_large_sample() -> None:
    values = np.random.default_rng(0).normal(0.4, 0.2, 2000)
    low, high = bootstrap_interval(values.tolist(), seed=1)
    half = 1.96 * values.std() / 2000**0.5
    assert abs(low - (values.mean() - half)) < 0.1 * half
    assert abs(high - (values.mean() + half)) < 0.1 * half


def test_same_seed_same_interval_and_a_constant_has_none() -> None:
    values = [0.0, 1.0, 0.5, 1.0]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert np.allclose(bootstrap_interval([0.7] * 50), 0.7)
