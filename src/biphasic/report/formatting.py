"""Format numbers, tables and pages of reports as Markdown, HTML and CSV."""

import html
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

import pandas as pd
from markdown_it import MarkdownIt

NOT_AVAILABLE = "n/a"
"""Shown for an undefined number, such as the standard deviation of a single value."""
MISSING = "missing"
"""Shown for a score that may still come."""


def format_rate(lr: float) -> str:
    """Format a learning rate as `5e-5`."""
    digits, power = f"{lr:.9e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_points(score: float, absent: str = NOT_AVAILABLE) -> str:
    """Format a score (0 to 1) in points: `88.23`; NaN as `absent`."""
    return absent if math.isnan(score) else f"{100 * score:.2f}"


def format_signed(difference: float) -> str:
    """Format a difference of scores (0 to 1) in points with its sign: `+0.85`."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"  # -0.0 + 0.0 is 0.0


def format_p(value: float) -> str:
    """Format a p-value."""
    return NOT_AVAILABLE if math.isnan(value) else "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def format_interval(mean: float, half: float, format_mean: Callable[[float], str] = format_points) -> str:
    """Format a mean score (0 to 1) and the half-width of its interval in points: `88.23 ± 0.41`."""
    return format_mean(mean) + ("" if math.isnan(half) else f" ± {format_points(half)}")


def format_seeds(count: int, expected: int, settled: bool = True) -> str:
    """Format how many seeds have a score: `3`, or `2 of 3, rate open` if some are missing and the rate may change."""
    return (str(count) if count == expected else f"{count} of {expected}") + ("" if settled else ", rate open")


def markdown_table(header: Sequence[str], body: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table and an empty line after it; no lines if `body` is empty."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in body]
    return [f"| {' | '.join(header)} |", f"| {' | '.join('-' for _ in header)} |", *lines, ""] if lines else []


def markdown_page(lines: Iterable[str]) -> bytes:
    """Join lines into a Markdown file."""
    return ("\n".join(lines).rstrip() + "\n").encode()


def html_page(markdown: str, files: Mapping[str, bytes]) -> bytes:
    """Convert a Markdown page, whose first line is its title, into one HTML file that embeds its PNGs from `files`."""
    body = MarkdownIt("js-default").render(markdown)  # its preset for text of users: HTML in it is escaped
    for name in (name for name in files if name.endswith(".png")):
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{b64encode(files[name]).decode()}"')
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    return Template(template).substitute(title=title, body=body).encode()


def csv_table(table: pd.DataFrame) -> bytes:
    """Return a table as CSV without its index. NaN becomes an empty field."""
    return table.to_csv(index=False, lineterminator="\n").encode()


def escape(text: str) -> str:
    """Join a text into one line and escape Markdown's special characters. Underscores inside words are not special."""
    text = " ".join(text.split())
    return re.sub(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", lambda match: "\\" + match[0], text)
