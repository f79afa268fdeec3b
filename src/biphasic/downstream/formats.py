"""Read CSV and TSV files, SQuAD's own JSON, and files with a word and its label in each line, as in CoNLL-2003 and UNER."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

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
                row = {"id": str(question["id"]), "question": question["question"], "context": paragraph["context"]}
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

    Raises:
        UserError: a row is shorter or longer than the first one, a quotation mark is not closed, or two columns have the
            same name of `used`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    csv.field_size_limit(sys.maxsize)
    start, quoting = 1, csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    with open_text(file) as lines:
        rows = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        try:
            for row in rows:
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


COLUMN_FILES = (".conll", ".iob2", ".iob", ".bio")
EXAMPLE = "a word and its label in each line, such as `Paris B-LOC`, and a blank line after each sentence"
_TAGGED = re.compile(r"O|[BIESULMW][-_].+|.+[-_][BIESULMW]")
_RANGE = re.compile(r"\d+[-.]\d+", re.ASCII)
"""The number of a range of words (`1-2`) or an empty word (`1.1`) in CoNLL-U."""


def column_rows(file: str, names: Sequence[str] | None, columns: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Yield a file's sentences, as a list for each column. Comments and CoNLL-U's ranges of words are left out.

    Without `names` of all columns, the first is `tokens`, and the last of several `labels`. `columns` are the names of the
    tokens' column and, if labels are needed, of theirs.

    Raises:
        UserError: there are no labels but they are needed, the tokens are all numbers, or a line has another number of
            columns than the first.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with open_text(file) as text:
        lines = [line.rstrip("\r\n") for line in text]
    rows = [line for line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-"))]
    tabs = bool(rows) and "\t" in rows[0]

    def split(line: str) -> list[str]:
        """Return a line's fields. Other spaces, such as a no-break space, are part of a word."""
        return line.split("\t") if tabs else re.split(r"[ \t]+", line.strip(" \t"))

    width = len(split(rows[0])) if rows else 1
    if names is None:
        names = ["tokens", *(f"column {number}" for number in range(2, width)), *["labels"] * (width > 1)]
        if width == 1 and len(columns) > 1:
            raise UserError(f"{file}: has 1 column, so there are no labels; expected {EXAMPLE}")
    elif rows and len(names) != width:
        raise UserError(f"{file}: has {width} columns; expected {len(names)} columns, the names in source.columns")
    tokens = names.index(columns[0]) if columns[0] in names else 0
    label = names.index(columns[1]) if columns[1:] and columns[1] in names else -1
    labels = {fields[label] for fields in map(split, rows) if len(fields) == width}
    if rows and all(fields[tokens].isdecimal() for fields in map(split, rows) if len(fields) == width):
        problem = f"the tokens, column {tokens + 1} of {width}, are all numbers ({', '.join(split(rows[0]))})"
        raise UserError(f"{file}: {problem}; source.columns names the columns, such as [number, tokens, labels]")
    sentence: list[list[str]] = []
    for place, line in enumerate([*lines, ""], start=1):
        fields = split(line)
        if not line.strip():
            if sentence:
                yield dict(zip(names, map(list, zip(*sentence, strict=True)), strict=True))
            sentence = []
        elif line.startswith("-DOCSTART-") or (tokens and _RANGE.fullmatch(fields[0])):
            continue
        elif len(fields) == width:
            # A line that begins with `#` may be the word `#` or one like `#tag`, with a label.
            if not line.startswith("#") or fields[label] in labels or _TAGGED.fullmatch(fields[label]) or width == 1:
                sentence.append(fields)
        elif not line.startswith("#"):
            expected = f"expected {width} columns, as in the first line"
            raise UserError(f"{file}:{place}: has {len(fields)} columns; {expected}: {EXAMPLE}")
