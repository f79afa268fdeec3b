"""Format the numbers of a report."""

from __future__ import annotations

import math
from collections.abc import Callable

NOT_AVAILABLE = "n/a"
"""Shown for a number that the scores don't determine, such as the deviation of a single value."""
MISSING = "missing"
"""Shown for a score that may still come."""


def format_rate(lr: float) -> str:
    """Format a learning rate as `5e-5`."""
    digits, power = f"{lr:.9e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_points(score: float) -> str:
    """Format a score from 0 to 1 in points: `88.23`; NaN is `n/a`."""
    return NOT_AVAILABLE if math.isnan(score) else f"{100 * score:.2f}"


def format_signed(difference: float) -> str:
    """Format a difference of scores from 0 to 1 in points with its sign: `+0.85`."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"  # -0.0 + 0.0 is 0.0


def format_p(value: float) -> str:
    """Format a p-value; NaN is `n/a`."""
    if math.isnan(value):
        return NOT_AVAILABLE
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def format_interval(mean: float, half: float, format_mean: Callable[[float], str] = format_points) -> str:
    """Format a mean and half of its interval, for scores from 0 to 1, in points: `88.23 ± 0.41`."""
    return format_mean(mean) + ("" if math.isnan(half) else f" ± {format_points(half)}")


def format_seeds(count: int, expected: int, settled: bool = True) -> str:
    """Format the number of seeds with a score: `3`, or `2 of 3, rate open` if more are expected and the rate may change."""
    return (str(count) if count == expected else f"{count} of {expected}") + ("" if settled else ", rate open")
