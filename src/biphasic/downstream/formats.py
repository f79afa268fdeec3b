"""Read CSV and TSV files, SQuAD's own JSON, and files with a word and its label in each line, as in CoNLL-2003 and UNER."""

import csv
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from biphasic.conversion.source_files import require_separator
from biphasic.errors import UserError
from biphasic.storage import filesystem

SQUAD_EXAMPLE = '{"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…", "answers": […]}]}]}]}'


def open_text(file: str) -> io.TextIOBase:
    """Open a UTF-8 file without its byte order mark, decompressed according to its name.

    An archive that is cut short is an OSError when it is read.
    """
    system, name = filesystem(file)
    stream: Any = system.open_input_stream(name, compression="detect")
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")


def json_rows(file: str) -> list[dict[str, Any]] | None:
    """Return the questions of a file in SQuAD's own format, or the rows of a list; None for lines of JSON.

    Raises a UserError if a question lacks a field.
    """
    try:
        with open_text(file) as text:
            content = json.load(text)
    except ValueError:  # lines of JSON
        return None
    if isinstance(content, list):
        return content
    articles = content.get("data") if isinstance(content, dict) else None
    if not isinstance(articles, list) or not all(isinstance(one, dict) and "paragraphs" in one for one in articles):
        return None
    rows = []
    try:
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            for question in paragraph["qas"]:
                answers = [] if question.get("is_impossible") else question.get("answers", [])
                spans = {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}
                id = None if question["id"] is None else str(question["id"])
                row = {"id": id, "question": question["question"], "context": paragraph["context"]}
                rows.append({**row, "answers": spans})
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: question {len(rows) + 1} lacks {error}; expected {SQUAD_EXAMPLE}") from None
    return rows


def table_rows(
    file: str, separator: str, columns: Sequence[str] | None, used: Sequence[str]
) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV or TSV file. Values are texts; an empty field is None.

    Fields of a CSV file may be in quotation marks; those of a TSV file are read as they are. `columns` names the columns of
    a file without a header. Other readers silently merge the rows up to the next quotation mark, and fill short rows.

    Raises a UserError if a row is shorter or longer than the first one, a quotation mark is not closed, or two columns
    have the same name of `used`; and a UnicodeDecodeError if the file is not UTF-8.
    """
    csv.field_size_limit(sys.maxsize)
    start, is_first, quoting = 1, True, csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    with open_text(file) as lines:
        rows = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        try:
            for row in rows:
                if row and columns and is_first:
                    _require_no_header(file, row, columns)
                is_first = is_first and not row
                if row and columns is None:
                    require_separator(f"{file}:{start}", row, separator)
                if row and len(row) != len(columns or row):
                    raise UserError(f"{file}:{start}: has {len(row)} fields; expected {len(columns or row)}, as before")
                if row and columns:
                    yield {name: value or None for name, value in zip(columns, row, strict=True)}
                if columns is None and (repeated := [name for name in used if row.count(name) > 1]):
                    problem = f"two columns are named {repeated[0]!r}: expected one; rename the other"
                    raise UserError(f"{file}: {problem}")
                columns, start = columns or row, rows.line_num + 1
        except csv.Error as error:
            problem = f"a quotation mark in this line or after it is not closed ({error})"
            raise UserError(f"{file}:{start}: {problem}; quotation marks are text in a .tsv file") from None


def _require_no_header(file: str, row: Sequence[str], columns: Sequence[str]) -> None:
    """Raise a UserError if the first row has the names in `source.columns`, in any order: it would be an example."""
    if sorted(map(str.casefold, row)) == sorted(map(str.casefold, columns)):
        raise UserError(f"{file}: the first row names the columns: expected no source.columns, or a file without this row")


COLUMN_FILES = (".conll", ".iob2", ".iob", ".bio")
EXAMPLE = "a word and its label in each line, such as `Paris B-LOC`, and a blank line after each sentence"
_NUMBER = re.compile(r"\d+([-.]\d+)?", re.ASCII)
"""A word's number, or in CoNLL-U a range of words (`1-2`) or an empty word (`1.1`)."""
_TAGGED = re.compile(r"O|[BIESULMW][-_].+|.+[-_][BIESULMW]")


@dataclass(frozen=True)
class _ColumnLayout:
    """What the columns of a file are. Columns count from 0."""

    tabs: bool
    """Whether tabs separate the fields, or else spaces."""
    width: int
    number: int | None
    """The column with the words' numbers."""
    tokens: int
    labels: int | None
    known_labels: frozenset[str]

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


def _read_layout(file: str, names: Sequence[str] | None, columns: Sequence[str]) -> _ColumnLayout:
    with open_text(file) as text:
        lines = [line for line in itertools.islice(text, 10_000) if _is_row(line)]
    rows = [line for line in lines if not line.startswith("#")] or lines
    tabs = bool(rows) and "\t" in rows[0]
    split = _ColumnLayout(tabs, 0, None, 0, None, frozenset()).fields
    counts = Counter(len(split(line)) for line in rows)
    width = counts.most_common(1)[0][0] if counts else 1
    fields = [row for row in map(split, rows) if len(row) == width]
    values = [{row[column] for row in fields} for column in range(width)]
    numeric = [all(map(_NUMBER.fullmatch, column)) for column in values]
    if names is not None and len(names) != width and fields:
        raise UserError(f"{file}: has {width} columns; expected {len(names)} columns, the names in source.columns")
    tokens, labels = int(names is None and width > 1 and numeric[0]), None
    if names is not None:
        _require_no_header(file, split(rows[0]) if rows else [], names)
        places = {name: place for place, name in enumerate(names)}
        tokens, labels = places.get(columns[0], 0), places.get(columns[1]) if len(columns) > 1 else None
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
    return _ColumnLayout(tabs, width, number, tokens, labels, known)


def column_rows(file: str, names: Sequence[str] | None, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Yield a file's sentences, as a list for each column. Comments and CoNLL-U's ranges of words are left out.

    Without `names` of all columns, they are `tokens` and `labels`: the token is the first column, and the label the last
    one with labels; if the first column numbers the words, as in UNER, the token is the second, and the label the first
    one with labels. This is decided once, from the file's first 10,000 lines. `columns` are the names of the tokens' column
    and, if labels are needed, of theirs.

    Raises a UserError if there are no labels but they are needed, the tokens are all numbers, or a line has another number
    of fields than most; and a UnicodeDecodeError if the file is not UTF-8.
    """
    layout = _read_layout(file, names, columns)
    own = {"tokens": layout.tokens, "labels": layout.labels}
    places = own if names is None else {name: place for place, name in enumerate(names)}
    sentence: list[list[str]] = []
    with open_text(file) as lines:
        for number, line in enumerate(itertools.chain(lines, ["\n"]), start=1):
            if not line.strip():
                if sentence:
                    values = list(zip(*sentence, strict=True))
                    yield {name: list(values[place]) for name, place in places.items() if place is not None}
                sentence = []
                continue
            if not _is_row(line) or layout.is_comment(line):
                continue
            fields = layout.fields(line)
            if len(fields) != layout.width:
                expected = f"expected {layout.width} columns, as in the other lines"
                raise UserError(f"{file}:{number}: has {len(fields)} columns; {expected}: {EXAMPLE}")
            if layout.number is None or fields[layout.number].isdecimal():
                sentence.append(fields)


def _is_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("-DOCSTART-")
