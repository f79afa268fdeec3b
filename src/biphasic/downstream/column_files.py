"""Read files with a word and its label in each line (`.conll`, `.iob2`, `.iob`, `.bio`), as in CoNLL-2003 and UNER.

What each column is, is decided once for a file, from its first lines.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from biphasic.downstream.formats import open_text
from biphasic.errors import UserError

COLUMN_FILES = (".conll", ".iob2", ".iob", ".bio")
EXAMPLE = "a word and its label in each line, such as `Paris B-LOC`, and a blank line after each sentence"
_DECIDING_LINES = 10_000
_NUMBER = re.compile(r"\d+([-.]\d+)?", re.ASCII)
"""A word's number, or in CoNLL-U a range of words (`1-2`) or an empty word (`1.1`)."""
_TAGGED = re.compile(r"O|[BIESULMW][-_].+|.+[-_][BIESULMW]")


@dataclass(frozen=True)
class ColumnLayout:
    """What the columns of a file are. Columns count from 0."""

    tabs: bool
    """Whether tabs separate the fields, or else spaces."""
    width: int
    number: int | None
    """The column with the words' numbers."""
    tokens: int
    labels: int | None
    known_labels: frozenset[str]
    sample: tuple[str, ...]
    """The first three lines with a word."""

    def fields(self, line: str) -> list[str]:
        """Return a line's fields. Other spaces, such as a no-break space, are part of a word."""
        line = line.rstrip("\r\n")
        return line.split("\t") if self.tabs else re.split(r"[ \t]+", line.strip(" \t"))

    def is_comment(self, line: str) -> bool:
        """Return whether a line that begins with `#` is a comment, and not the word `#` or one like `#tag`."""
        fields = self.fields(line)
        if not line.startswith("#") or self.number is not None or len(fields) != self.width:
            return line.startswith("#")
        label = "O" if self.labels is None else fields[self.labels]
        return label not in self.known_labels and not _TAGGED.fullmatch(label)

    def describe(self) -> str:
        """Return one line that says what the columns are, with the first lines."""
        names = ["unused"] * self.width
        for name, column in (("number", self.number), ("token", self.tokens), ("label", self.labels)):
            if column is not None:
                names[column] = name
        between = "tabs" if self.tabs else "spaces"
        return (
            f"{', '.join(names)}, between {between}: {' | '.join(' '.join(self.fields(line)) for line in self.sample)}"
        )


def read_layout(file: str, names: Sequence[str] | None, columns: Sequence[str]) -> ColumnLayout:
    """Decide what the columns of a file are, from its first 10,000 lines.

    Args:
        file: a local file, which may be compressed.
        names: the names of all columns. Without them, the token is in the first column, and the label in the last one
            with labels; if the first column numbers the words, as in UNER, in the second and the first with labels.
        columns: the names of the tokens' column and, if labels are needed, of theirs.

    Raises:
        UserError: there are no labels but they are needed, or the tokens are all numbers.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with open_text(file) as text:
        lines = [line for line in itertools.islice(text, _DECIDING_LINES) if _is_row(line)]
    rows = [line for line in lines if not line.startswith("#")] or lines
    tabs = bool(rows) and "\t" in rows[0]
    split = ColumnLayout(tabs, 0, None, 0, None, frozenset(), ()).fields
    counts = Counter(len(split(line)) for line in rows)
    width = counts.most_common(1)[0][0] if counts else 1
    fields = [row for row in map(split, rows) if len(row) == width]
    values = [{row[column] for row in fields} for column in range(width)]
    numeric = [all(map(_NUMBER.fullmatch, column)) for column in values]
    if names is not None and len(names) != width and fields:
        raise UserError(f"{file}: has {width} columns; expected {len(names)} columns, the names in source.columns")
    tokens = 0 if names is None or columns[0] not in names else names.index(columns[0])
    if names is None and width > 1 and numeric[0]:
        tokens = 1
    labels = None
    if names is not None:
        labels = names.index(columns[1]) if len(columns) > 1 and columns[1] in names else None
    elif tokens + 1 < width:
        tagged = [column for column in range(tokens + 1, width) if "O" in values[column]]
        labels = (tagged or [width - 1])[0 if tokens else -1]
    if fields and names is None and labels is None and len(columns) > 1:
        words = "the first of which numbers the words" if tokens else "so there are no labels"
        raise UserError(f"{file}: has {width} column{'s' * (width > 1)}, {words}; expected {EXAMPLE}")
    if fields and numeric[tokens]:
        numbers = ", ".join(row[tokens] for row in fields[:3])
        problem = f"the tokens, column {tokens + 1} of {width}, are all numbers ({numbers})"
        raise UserError(f"{file}: {problem}; source.columns names the columns, such as [number, tokens, labels]")
    number = 0 if tokens and numeric[0] else None
    known = frozenset() if labels is None else frozenset(values[labels])
    layout = ColumnLayout(tabs, width, number, tokens, labels, known, ())
    sample = tuple(itertools.islice((line for line in lines if not layout.is_comment(line)), 3))
    return ColumnLayout(tabs, width, number, tokens, labels, known, sample)


def column_rows(file: str, names: Sequence[str] | None, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Yield a file's sentences, as a list for each column. Arguments and errors are those of `read_layout`.

    Without `names`, the columns are `tokens` and `labels`. Comments, `-DOCSTART-` lines and CoNLL-U's ranges of words are
    left out.

    Raises:
        UserError: also if a line has another number of fields than most.
    """
    layout = read_layout(file, names, columns)
    sentence: list[list[str]] = []
    with open_text(file) as lines:
        for place, line in enumerate(itertools.chain(lines, ["\n"]), start=1):
            if not line.strip():
                if sentence:
                    yield _sentence(sentence, names, layout)
                sentence = []
                continue
            if not _is_row(line) or layout.is_comment(line):
                continue
            fields = layout.fields(line)
            if len(fields) != layout.width:
                expected = f"expected {layout.width} columns, as in the other lines"
                raise UserError(f"{file}:{place}: has {len(fields)} columns; {expected}: {EXAMPLE}")
            if layout.number is None or fields[layout.number].isdecimal():
                sentence.append(fields)


def _is_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("-DOCSTART-")


def _sentence(lines: list[list[str]], names: Sequence[str] | None, layout: ColumnLayout) -> dict[str, list[str]]:
    columns = [list(column) for column in zip(*lines, strict=True)]
    if names is not None:
        return dict(zip(names, columns, strict=True))
    labels = {} if layout.labels is None else {"labels": columns[layout.labels]}
    return {"tokens": columns[layout.tokens], **labels}
