"""Read CSV and TSV files, and SQuAD's own form: .json with {"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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


def parse_json(text: str) -> Any:
    """Return the content of JSON text; a ValueError also if an object has a key twice, of which others use the last."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise RepeatedNameError(f"the key {_repeated(name for name, _ in pairs)!r} occurs twice in an object")
        return content

    return json.loads(text, object_pairs_hook=unique)


class RepeatedNameError(ValueError):
    """Two values of a row have the same name."""


def _repeated(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def json_rows(file: str) -> list[dict[str, Any]] | None:
    """Return the questions of a file in SQuAD's own format, or the rows of a list; None for lines of JSON.

    Raises:
        UserError: a question lacks a field.
    """
    try:
        with open_text(file) as text:
            content = parse_json(text.read())
    except RepeatedNameError as error:
        raise UserError(f"{file}: {error}") from None
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
    file: str, separator: str, quoted: bool, columns: Sequence[str] | None, used: Sequence[str]
) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV or TSV file. Values are texts; an empty field is None.

    `columns` names the columns of a file without a header. Other readers silently merge the rows up to the next quotation
    mark, and fill short rows with nulls.

    Raises:
        UserError: a row is shorter or longer than the first one, a quotation mark is not closed, or two columns have the
            same name of `used`.
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
                if columns is None and row and (name := _repeated(each for each in row if each in used)) is not None:
                    raise UserError(f"{file}: two columns are named {name!r}: expected one; rename the other")
                columns, start = columns or row, rows.line_num + 1
        except csv.Error as error:
            problem = f"a quotation mark in this line or after it is not closed ({error})"
            raise UserError(f"{file}:{start}: {problem}; set quoting: {advice}") from None
