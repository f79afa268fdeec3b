"""Read the file formats in which datasets for token labels and question answering are published, and CSV and TSV.

columns   .conll, .iob2, .iob, .bio: a word and its label in each line, a blank line after each sentence
SQuAD     .json with {"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}, versions 1.1 and 2.0
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from biphasic.errors import UserError
from biphasic.storage import filesystem

COLUMN_FILES = (".conll", ".iob2", ".iob", ".bio")
COLUMNS_EXAMPLE = "a word and its label in each line, such as `Paris B-LOC`, and a blank line after each sentence"
SQUAD_EXAMPLE = '{"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…", "answers": […]}]}]}]}'
_PREFIXES = {"S": "B", "U": "B", "E": "I", "L": "I"}
"""BIO's prefix for each prefix that only BIOES or BILOU has."""


def open_text(file: str) -> io.TextIOBase:
    """Open a UTF-8 file without its byte order mark, decompressed according to its name.

    An archive that is cut short is an OSError when it is read.
    """
    system, name = filesystem(file)
    stream: Any = system.open_input_stream(name, compression="detect")
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")


def column_rows(file: str, names: Sequence[str] | None) -> Iterator[dict[str, list[str]]]:
    """Yield the sentences of a file with a word in each line, as a list for each column.

    Lines that begin with `# ` and have a different number of fields are comments; `-DOCSTART-` lines are left out.
    Without `names`, `tokens` is the first column and `labels` the last, as in CoNLL-2003; if the first column numbers
    the words, as in UNER, they are the second and third.

    Raises:
        UserError: a line has a different number of fields.
        UnicodeDecodeError: the file is not UTF-8.
    """
    width: int | None = None
    tabs = False
    sentence: list[list[str]] = []
    with open_text(file) as lines:
        for number, line in enumerate(itertools.chain(lines, ["\n"]), start=1):
            if not line.strip():
                if sentence:
                    yield _sentence(sentence, names)
                sentence = []
                continue
            # The first line that isn't a comment decides whether tabs or spaces separate the fields.
            tabs = "\t" in line if width is None else tabs
            fields = line.rstrip("\r\n").split("\t") if tabs else line.split()
            is_other = len(fields) != width or (not tabs and "\t" in line)
            if line.startswith("-DOCSTART-") or (line.startswith("# ") and is_other):
                continue
            width = width or len(fields)
            expected = max(width, 2) if names is None else len(names)
            if not len(fields) == width == expected:
                as_before = ", as in the first line" if names is None else ""
                raise UserError(
                    f"{file}:{number}: has {len(fields)} columns; expected {expected} columns{as_before}: "
                    f"{COLUMNS_EXAMPLE}; source.columns names them"
                )
            sentence.append(fields)


def _sentence(lines: list[list[str]], names: Sequence[str] | None) -> dict[str, list[str]]:
    columns = [list(column) for column in zip(*lines, strict=True)]
    if names is not None:
        return dict(zip(names, columns, strict=True))
    if columns[0] == [str(number) for number in range(1, len(lines) + 1)] and len(columns) > 2:
        return {"tokens": columns[1], "labels": columns[2]}
    return {"tokens": columns[0], "labels": columns[-1]}


def as_bio(labels: list[str]) -> list[str]:
    """Convert a sentence's labels to BIO from IOB (`B-` only between neighbors of a type), BIOES or BILOU."""
    converted = [_PREFIXES.get(label[:1], label[:1]) + label[1:] for label in labels]
    before = ["O", *converted]
    return [
        "B" + label[1:] if label[:1] == "I" and previous[2:] != label[2:] else label
        for previous, label in zip(before, converted, strict=False)
    ]


def bio_names(sentences: Iterable[list[str]]) -> list[str] | None:
    """Return the names of all labels in BIO: `O`, then by type, `B-` before `I-`. None if these are not BIO labels."""
    labels = {label for sentence in sentences for label in as_bio(sentence)}
    if "O" not in labels or any(label != "O" and label[:2] not in ("B-", "I-") for label in labels):
        return None
    return sorted(labels, key=lambda label: (label != "O", label[2:], label))


def json_rows(file: str) -> list[dict[str, Any]] | None:
    """Return the questions of a file in SQuAD's own format, or the rows of a list; None for lines of JSON.

    Raises:
        UserError: a question lacks a field.
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
    file: str, separator: str, quoted: bool, columns: Sequence[str] | None
) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV or TSV file. Values are texts; an empty field is None.

    `columns` names the columns of a file without a header. Other readers silently merge the rows up to the next quotation
    mark, and fill short rows with nulls.

    Raises:
        UserError: a row is shorter or longer than the first one, or a quotation mark is not closed.
        UnicodeDecodeError: the file is not UTF-8.
    """
    csv.field_size_limit(sys.maxsize)
    start, advice = 1, "none to read quotation marks as text" if quoted else "standard if fields are quoted"
    with open_text(file) as lines:
        quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        rows = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        try:
            for row in rows:
                if row and len(row) != len(columns or row):
                    problem = f"has {len(row)} fields; expected {len(columns or row)}, as before"
                    raise UserError(f"{file}:{start}: {problem}; set quoting: {advice}")
                if row and columns:
                    yield {name: value or None for name, value in zip(columns, row, strict=True)}
                columns, start = columns or row, rows.line_num + 1
        except csv.Error as error:
            problem = f"a quotation mark in this line or after it is not closed ({error})"
            raise UserError(f"{file}:{start}: {problem}; set quoting: {advice}") from None
