"""Format the tables of a report as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence

from biphasic.report.statistics import Interval

NOT_AVAILABLE = "n/a"
"""Shown for a number that the scores don't determine, such as the deviation of a single value."""


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end."""
    return [*(f"| {' | '.join(row)} |" for row in [header, ["-"] * len(header), *body]), ""]


def csv_table(columns: str, rows: Iterable[Sequence[object]]) -> bytes:
    """Return a CSV file. `columns` has the names separated by spaces; None becomes an empty field."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([columns.split(), *rows])
    return text.getvalue().encode()


def escape(text: str) -> str:
    """Join a text into one line and escape Markdown's special characters. Underscores inside words are not special."""
    text = " ".join(text.split())
    return re.sub(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", lambda match: "\\" + match[0], text)


def format_rate(lr: float) -> str:
    """Format a learning rate as `5e-5`."""
    digits, power = f"{lr:.9e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_points(score: float) -> str:
    """Format a score from 0 to 1 in points: `88.23`."""
    return f"{100 * score:.2f}"


def format_signed(difference: float) -> str:
    """Format a difference of scores from 0 to 1 in points with its sign: `+0.85`."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"  # -0.0 + 0.0 is 0.0


def format_p(value: float | None) -> str:
    """Format a p-value; None is `n/a`."""
    if value is None:
        return NOT_AVAILABLE
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def format_interval(interval: Interval, format_mean: Callable[[float], str]) -> str:
    """Format a mean and half of its interval, for scores from 0 to 1, in points: `88.23 ± 0.41`."""
    return format_mean(interval.mean) + ("" if interval.half is None else f" ± {format_points(interval.half)}")
