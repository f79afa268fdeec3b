"""Write the pages and tables of a report as Markdown and CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd


def markdown_table(header: Sequence[str], body: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end; none if `body` is empty."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in body]
    return [f"| {' | '.join(header)} |", f"| {' | '.join('-' for _ in header)} |", *lines, ""] if lines else []


def markdown_page(lines: Iterable[str]) -> bytes:
    """Return a Markdown file with these lines."""
    return ("\n".join(lines).rstrip() + "\n").encode()


def csv_table(table: pd.DataFrame) -> bytes:
    """Return a table as a CSV file, without its index. NaN becomes an empty field."""
    return table.to_csv(index=False, lineterminator="\n").encode()


def escape(text: str) -> str:
    """Join a text into one line and escape Markdown's special characters. Underscores inside words are not special."""
    text = " ".join(text.split())
    return re.sub(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", lambda match: "\\" + match[0], text)
