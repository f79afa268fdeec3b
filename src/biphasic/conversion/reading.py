"""Read documents from Parquet (by row group, only the needed columns), and from JSON, CSV and plain text (by line)."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from biphasic.config.convert import ConvertConfig, FilesSource, FilterConfig
from biphasic.conversion.source_files import (
    JSON_KINDS,
    READ_BYTES,
    TEXT_KINDS,
    DamagedFileError,
    SourceFile,
    kind_of,
    open_file,
    open_text,
    read_error,
    require_separator,
    without_byte_order_mark,
)
from biphasic.errors import UserError, first_line
from biphasic.storage.hub import hub_errors

_BATCH_ROWS = 1000
_MAX_CHARACTERS = 2**24
_MAX_FIELD = 2**28
"""Maximum number of characters in a field of a CSV file, each of four bytes. An open quotation mark's field ends there."""
_TEXT_BYTES, _JSON_BYTES = 4, 12
"""Maximum bytes of a character in UTF-8, and as JSON's escapes."""
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Document(NamedTuple):
    """A text and its id."""

    id: str
    text: str


class Skipped(NamedTuple):
    """An entry of a file that is not used: its kind (for counting), its position, and the reason."""

    kind: str
    where: str
    reason: str


Entry = Document | Skipped
FILTERED = "filtered"
"""The kind of an entry that a filter leaves out. This is not an error."""


def columns(config: ConvertConfig) -> list[str]:
    """Return the columns to read, each once."""
    names = [config.text_column, config.id_column, *(condition.column for condition in config.filters)]
    return [name for name in dict.fromkeys(names) if name is not None]


def read_documents(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    """Yield the file's documents in order, and the entries that are skipped.

    Without `id_column`, and where the column is null, NaN or empty, a document's id is a hash of its text.

    Raises:
        DamagedFileError: the file can't be read to its end. The message says how far it was read.
        UserError: a column is missing (text files have none), a text is not a string, or the file became unreachable.
    """
    kind, separator = kind_of(file.path), config.source.separator
    if kind in TEXT_KINDS:
        return _read_text(file, config)
    readers = {"parquet": _read_parquet, **dict.fromkeys(JSON_KINDS, _read_json)}
    entries = readers.get(kind, _read_csv)(file, config)
    return entries if separator is None else (part for each in entries for part in _divided(each, separator))


def read_up_to_damage(file: SourceFile, config: ConvertConfig, damaged: list[str]) -> Iterator[Entry]:
    """Yield what `read_documents` yields. With `on_bad_file: skip`, a DamagedFileError's message is added to `damaged`."""
    try:
        yield from read_documents(file, config)
    except DamagedFileError as error:
        if config.on_bad_file == "stop":
            raise
        damaged.append(str(error))


def require_columns(where: str, existing: Sequence[str], path: str, config: ConvertConfig) -> None:
    """Raise a UserError, which shows what the file should hold, unless it has each column once."""
    for column in columns(config):
        if (count := existing.count(column)) > 1:
            raise UserError(f"source {where}: has several columns {column!r}: rename them, or remove all but one")
        if not count:
            # A JSON key can contain half of a surrogate pair, which can't be printed.
            names = ", ".join(sorted(existing)).encode("utf-8", "replace").decode()
            advice = f"set text_column, id_column or filters; expected {_expected(path, config)}"
            raise UserError(f"source {where}: has no column {column!r} (it has: {names}); {advice}")


def _expected(path: str, config: ConvertConfig) -> str:
    """Return what a file with columns should hold, with an example line."""
    if (kind := kind_of(path)) == "parquet":
        return f"the columns {', '.join(columns(config))}"
    if kind in _DELIMITERS:
        return f"{_DELIMITERS[kind].join(columns(config))} in the first line"
    return f"a line such as {json.dumps(dict.fromkeys(columns(config), '…'), ensure_ascii=False)}"


def _divided(entry: Entry, separator: str) -> list[Entry]:
    """Return the documents between the separators in a text. Where they are several, a number is added to the id."""
    if isinstance(entry, Skipped) or separator not in entry.text:
        return [entry]
    texts = [text for part in entry.text.split(separator) if (text := part.strip("\r\n"))]
    if len(texts) < 2:
        return [Document(entry.id, text) for text in texts] or [Skipped("without text", entry.id, "has no text")]
    return [Document(f"{entry.id}-{number}", text) for number, text in enumerate(texts)]


def read_start(file: SourceFile, config: ConvertConfig) -> None:
    """Read a file's first entry, or a text file's first line. Raises the errors of `read_documents`."""
    is_text = kind_of(file.path) in TEXT_KINDS and not config.filters
    next(iter(_lines(file, READ_BYTES) if is_text else read_documents(file, config)), None)


def _document(
    text: str | bytes | None,
    values: dict[str, Any],
    where: str,
    config: ConvertConfig,
    compared: dict[str, Any] | None = None,
) -> Entry:
    """Return the document of an entry, or why it is skipped. `text` is bytes if it is not UTF-8.

    Filters compare the `values`, or those of `compared`, if they are others.
    """
    compared = values if compared is None else compared
    if not all(_passes(compared.get(condition.column), condition) for condition in config.filters):
        return Skipped(FILTERED, where, "")
    if isinstance(text, bytes):
        return Skipped("not UTF-8", where, "its text is not UTF-8")
    if not text:
        return Skipped("without text", where, "has no text")
    if len(text) > _MAX_CHARACTERS:
        return Skipped("too long", where, f"its text has {len(text):,} characters; the limit is {_MAX_CHARACTERS:,}")
    id = None if config.id_column is None else values.get(config.id_column)
    if id is not None and id == id and str(id).strip():  # NaN differs from itself
        return Document(str(id), text)
    return Document(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(), text)


def _read_parquet(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row, names, filtered = 0, columns(config), {condition.column for condition in config.filters}
    try:
        with hub_errors(), open_file(file) as handle:
            reader = pq.ParquetFile(handle, page_checksum_verification=True)
            first, end = file.row_groups or (0, reader.num_row_groups)
            row = sum(reader.metadata.row_group(group).num_rows for group in range(first))
            # One row group at a time: of several, pyarrow would keep in memory all that it has read.
            for group in range(first, end):
                for batch in reader.iter_batches(_BATCH_ROWS, [group], names):
                    stored = {name: _column_values(batch.column(name)) for name in names}
                    compared = {name: _as_written(stored[name], batch.column(name).type) for name in filtered}
                    for number in range(len(batch)):
                        row += 1
                        values, others = ({name: of[number] for name, of in each.items()} for each in (stored, compared))
                        yield _document(values[config.text_column], values, f"{file.path}, row {row}", config, others)
    except (OSError, pa.ArrowException) as error:
        raise read_error(file, f"is damaged after row {row}", error) from error


def _column_values(column: Any) -> list[Any]:
    """Return a column's values, as bytes if they are texts that are not UTF-8."""
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        values = column.cast(pa.large_binary(), safe=False).to_pylist()
        return [None if value is None else _decode(value) for value in values]


def _as_written(values: list[Any], kind: Any) -> list[Any]:
    """Return a column's values as JSON would have them. In double precision, 0.7 of a 32-bit float is 0.699999988."""
    while (inner := getattr(kind, "value_type", None)) is not None:  # of lists and dictionaries
        kind = inner
    single: Callable[[float], Any] | None = {"float": np.float32, "halffloat": np.float16}.get(str(kind))

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(each) for each in value]
        if isinstance(value, bytes):
            return _decode(value)
        if isinstance(value, Decimal):
            return int(value) if value == int(value) else float(value)
        return float(str(single(value))) if single is not None and value is not None else value

    return [written(value) for value in values]


def _decode(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _lines(file: SourceFile, size: int = -1) -> Iterator[bytes]:
    """Yield a file's lines; of a longer line, only the first `size` bytes."""
    number = 0
    with open_text(file, lambda: f"line {number}") as reader:
        while line := reader.readline(size):
            number += 1
            yield line if number > 1 else without_byte_order_mark(line, file)
            while len(line) == size and not line.endswith(b"\n"):
                line = reader.readline(size)


def _read_json(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    """The first object must have all columns, and text or null as its text. In a later one, a missing key is null."""
    size, is_first, is_start = _JSON_BYTES * _MAX_CHARACTERS, True, True
    for number, line in enumerate(_lines(file, size), start=1):
        where, stripped = f"{file.path}, line {number}", line.strip()
        if is_start and stripped.startswith(b"["):
            yield from _read_json_array(file, config)
            return
        is_start &= not stripped
        if len(line) == size:
            yield Skipped("too long", where, f"has more than {size:,} bytes")
        elif stripped:
            try:
                values = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Skipped("not UTF-8", where, f"is not UTF-8 ({first_line(error)})")
            except (ValueError, RecursionError) as error:
                expected = _expected(file.path, config)
                if is_first and stripped == b"{":
                    problem = f"begins an object over several lines; expected {expected}, or an array of objects"
                    raise UserError(f"source {where}: {problem}") from None
                yield Skipped("not JSON", where, f"is not JSON ({first_line(error)}); expected {expected}")
            else:
                yield _json_object(values, file.path, where, config, is_first)
                is_first &= not isinstance(values, dict)


def _read_json_array(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    with open_text(file, lambda: "object 0") as stream:
        content = without_byte_order_mark(stream.read(), file)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        message = f"is damaged: it begins as a JSON array ({first_line(error)})"
        raise DamagedFileError(f"source {file.path}: {message}") from None
    for number, value in enumerate(values, start=1):
        if number == 1 and not isinstance(value, dict):
            expected = f"expected objects such as {_expected(file.path, config).removeprefix('a line such as ')}"
            raise UserError(f"source {file.path}: is a JSON array of {_type_name(value)}; {expected}")
        yield _json_object(value, file.path, f"{file.path}, object {number}", config, number == 1)


def _json_object(values: Any, path: str, where: str, config: ConvertConfig, is_first: bool) -> Entry:
    if not isinstance(values, dict):
        return Skipped("not JSON", where, f"is not JSON of the form {{{config.text_column!r}: …}}")
    if is_first:
        require_columns(where, list(values), path, config)
    text = values.get(config.text_column)
    if text is not None and not isinstance(text, str):
        problem = f"column {config.text_column!r} holds {type(text).__name__}, not text"
        if is_first:
            raise UserError(f"source {where}: {problem}; set text_column")
        return Skipped("without text", where, problem)
    if text and not text.isascii():
        # JSON can contain half of a surrogate pair, which UTF-8 can't encode.
        text = text.encode("utf-8", "replace").decode()
    return _document(text, values, where, config)


def _read_csv(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    line, marks, delimiter = "", 0, _DELIMITERS[kind_of(file.path)]

    def lines() -> Iterator[str]:
        nonlocal line, marks
        for content in _lines(file):
            # Bytes that are not UTF-8 become surrogates, so that only their row is skipped.
            line = content.decode("utf-8", "surrogateescape")
            marks += line.count('"')
            yield line

    csv.field_size_limit(_MAX_FIELD)
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    # A CSV file holds texts only, and filters may compare columns with numbers, true and false.
    numbers = {
        condition.column
        for condition in config.filters
        for value in (condition.min, condition.max, *(condition.any_of or []), *(condition.none_of or []))
        if value is not None and not isinstance(value, str)
    }
    broken = ""  # where a row with marks within a quoted field is, as long as its text may go on
    while True:
        start, before, row, problem = rows.line_num + 1, marks, [], ""
        where = f"{file.path}, line {start}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"is not CSV ({first_line(error)})"
        if row and header is not None and len(row) != len(header):
            problem = f"has {len(row)} field{'s' * (len(row) != 1)}, and the header has {len(header)}"
        if problem or broken:
            is_odd = (marks - before) % 2 == 1
            is_quoted = rows.line_num > start or line.startswith('"') or f'{delimiter}"' in line
            if problem and is_quoted and (is_odd or not row):
                broken = broken or where
            elif is_quoted and not is_odd:
                broken = ""
            # The next marks after such a row are a quoted field's, or its text has gone on, and the lines are no rows.
            goes_on = broken and marks > before and (is_odd or not is_quoted)
            if goes_on or "unexpected end" in problem or "field limit" in problem:
                message = "is damaged: a quotation mark in this line, or in one after it, is not closed or not doubled"
                raise DamagedFileError(f"source {broken or where}: {message}")
        if problem:
            yield Skipped("not CSV", where, problem)
        elif row and header is None:
            header = row
            require_separator(f"source {where}", header, delimiter)
            require_columns(where, header, file.path, config)
        elif row and header is not None:
            values: dict[str, Any] = dict(zip(header, row, strict=True))
            text = values[config.text_column]
            values |= {column: _scalar(values[column]) for column in numbers}
            values |= {condition.column: None for condition in config.filters if values[condition.column] == ""}
            yield _document(_decode(text.encode("utf-8", "surrogateescape")), values, where, config)


def _scalar(text: str) -> float | bool | str:
    for number in (int, float):  # a float has only 53 bits of a large whole number
        with suppress(ValueError):
            return number(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _read_text(file: SourceFile, config: ConvertConfig) -> Iterator[Entry]:
    if config.filters:
        advice = "remove filters, or the file from source.paths"
        raise UserError(f"{file.path}: a text file has no columns to filter by; {advice}")
    unit = config.source.text_files if isinstance(config.source, FilesSource) else "file"
    lines: list[bytes] = []
    size, start, limit = 0, 1, _TEXT_BYTES * _MAX_CHARACTERS

    def document() -> Entry:
        where, text = f"{file.path}, line {start}", _decode(b"".join(lines).strip(b"\r\n"))
        if size > limit or len(text) > _MAX_CHARACTERS:
            advice = "; set source.separator, or source.text_files: line or paragraph" if unit == "file" else ""
            return Skipped("too long", where, f"its text has more than {_MAX_CHARACTERS:,} characters{advice}")
        return _document(text, {}, where, config)

    for number, line, is_end in _text_parts(file, unit, config.source.separator, limit + 1):
        start = start if size else number
        size += len(line)
        if size <= limit:
            lines.append(line)
        if size and is_end:
            yield document()
            lines, size = [], 0
    if size:
        yield document()


def _text_parts(file: SourceFile, unit: str, separator: str | None, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield lines or their parts with the line's number, and whether a document ends after them."""
    end, is_start = (separator or "").encode(), True
    for number, line in enumerate(_lines(file, size), start=1):
        if not end:
            is_blank = not line.strip() and unit != "file"
            yield number, b"" if is_blank else line, is_blank or unit == "line"
            continue
        if len(line) == size:
            raise UserError(f"source {file.path}, line {number}: has more than {size:,} bytes; expected shorter lines")
        *ended, rest = line.split(end)
        for part in ended:
            yield number, part, True
        # Between a separator and a document's first line, line ends are no text.
        is_start = bool(ended) or is_start
        if not (is_start and not rest.strip(b"\r\n")):
            yield number, rest, False
            is_start = False


def _passes(value: Any, condition: FilterConfig) -> bool:
    """Return whether a document with this value is kept. Of a list, `any_of` and `none_of` compare each element.

    Raises a UserError if the value can't be compared with the filter's.
    """
    if value is None:
        return False
    low, high, any_of, none_of = condition.min, condition.max, condition.any_of, condition.none_of or []
    try:
        in_range = (low is None or value >= low) and (high is None or value <= high)
    except TypeError:
        raise UserError(f"filters: column {condition.column!r} holds {value!r}; min and max need numbers") from None
    values = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    for each in values:
        for name, others in (("any_of", any_of or []), ("none_of", none_of)):
            if wrong := [other for other in others if _type_name(other) != _type_name(each)]:
                held = f"{_type_name(each)}, such as {each!r}"
                given = f"{_type_name(wrong[0])} ({json.dumps(wrong[0])})"
                reason = "YAML reads words such as no, on, 2013 and 12:30 as text only in quotes"
                raise UserError(f"filters: column {condition.column!r} holds {held}, and {name} has {given}: {reason}")
    return in_range and (any_of is None or any(v in any_of for v in values)) and not any(v in none_of for v in values)


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "true and false"
    if isinstance(value, int | float | Decimal):
        return "numbers"
    return "text" if isinstance(value, str | bytes) else f"values of type {type(value).__name__}"
