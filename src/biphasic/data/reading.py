"""Documents out of files: Parquet row group by row group, JSONL and plain text line by line, only the needed columns."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from biphasic.config.conversion import ConvertConfig, FilesSource, FilterConfig
from biphasic.config.errors import UserError
from biphasic.storage import filesystem, short, store

_BATCH = 1000


class Document(NamedTuple):
    """A text and what names it."""

    id: str
    text: str


class Skipped(NamedTuple):
    """A record that gives no document: its `kind` for counting, and in words where it lies and what is wrong with it."""

    kind: str
    where: str
    what: str


class DamagedFile(UserError):
    """A file that can't be read, or not to its end."""


FILTERED = "filtered"
"""The kind of a record that a filter leaves out, which is nothing wrong."""


@dataclass(frozen=True)
class Columns:
    """Where a record keeps its text and its id; without `id`, a hash of the text names the document."""

    text: str
    id: str | None
    filters: tuple[FilterConfig, ...] = ()

    def names(self) -> list[str]:
        """The columns to read, each once."""
        return list(dict.fromkeys([self.text, *([self.id] if self.id else []), *(f.column for f in self.filters)]))


@dataclass(frozen=True)
class Reading:
    """How files are read: the columns, the longest text in characters, and what a document is in `.txt` files."""

    columns: Columns
    longest: int = 1 << 62
    text_files: str = "file"

    @staticmethod
    def of(config: ConvertConfig) -> Reading:
        """As a `job: convert` YAML says."""
        columns = Columns(config.text_column, config.id_column, tuple(config.filters))
        kind = config.source.text_files if isinstance(config.source, FilesSource) else "file"
        return Reading(columns, config.max_text_characters, kind)


@dataclass(frozen=True)
class Piece:
    """A file, or some row groups of a Parquet file (the first, and the one after the last)."""

    path: str
    bytes: int
    version: str
    row_groups: tuple[int, int] | None = None


def read_documents(piece: Piece, reading: Reading) -> Iterator[Document | Skipped]:
    """The piece's documents in order, and the records that give none.

    Raises:
        DamagedFile: naming the file that can't be read to its end, and how far it was read.
    """
    if piece.path.endswith(".parquet"):
        return _parquet(piece, reading)
    if ".txt" in piece.path.rpartition("/")[2]:
        return _text(piece, reading)
    return _jsonl(piece, reading)


def passes(values: dict[str, Any], filters: Sequence[FilterConfig]) -> bool:
    """Whether a record's values pass all filters."""
    return all(_passes(values[wanted.column], wanted) for wanted in filters)


def _passes(value: Any, wanted: FilterConfig) -> bool:
    if value is None:
        return False
    try:
        if wanted.min is not None and value < wanted.min:
            return False
        if wanted.max is not None and value > wanted.max:
            return False
    except TypeError:
        raise UserError(f"filters: column {wanted.column!r} holds {value!r}, which is no number") from None
    return (wanted.any_of is None or value in wanted.any_of) and not (wanted.none_of and value in wanted.none_of)


def missing_column(column: str, there: Sequence[str]) -> str:
    """What to say of a column that isn't there."""
    return f"has no column {column!r} (it has: {', '.join(sorted(there))}); set text_column, id_column or filters"


def _document(values: dict[str, Any], where: str, reading: Reading) -> Document | Skipped:
    """A record's document, or why it gives none."""
    columns, text = reading.columns, values[reading.columns.text]
    if columns.filters and not passes(values, columns.filters):
        return Skipped(FILTERED, where, "")
    if isinstance(text, bytes):
        return Skipped("not UTF-8", where, "its text is not UTF-8")
    if not text:
        return Skipped("without text", where, "has no text")
    if len(text) > reading.longest:
        limit = f"max_text_characters is {reading.longest:,}"
        return Skipped("too long", where, f"its text has {len(text):,} characters, and {limit}")
    return Document(_id_of(text) if columns.id is None else str(values[columns.id]), text)


def _id_of(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _parquet(piece: Piece, reading: Reading) -> Iterator[Document | Skipped]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = reading.columns.names()
    number = 0
    try:
        system, path = filesystem(piece.path)
        with system.open_input_file(path) as handle:
            reader = pq.ParquetFile(handle, page_checksum_verification=True)
            first, end = piece.row_groups or (0, reader.num_row_groups)
            number = sum(reader.metadata.row_group(group).num_rows for group in range(first))
            # One row group at a time: asked for all, pyarrow keeps what it has read of each.
            for group in range(first, end):
                for batch in reader.iter_batches(_BATCH, [group], names):
                    columns = {name: _values(batch.column(name)) for name in names}
                    for row in range(batch.num_rows):
                        number += 1
                        values = {name: column[row] for name, column in columns.items()}
                        yield _document(values, f"{piece.path}, row {number}", reading)
    except (OSError, pa.ArrowException) as error:
        raise _trouble(piece, f"row {number}", error) from error


def _trouble(piece: Piece, where: str, error: Exception) -> UserError:
    """A damaged file, or one that can't be reached at this moment: the reader's error doesn't tell."""
    folder, _, name = piece.path.rpartition("/")
    try:
        found = store(folder or ".").stat(name)
    except OSError as unreachable:
        advice = "what is finished is kept; run the same command again when it can be reached"
        return UserError(f"source {piece.path}: can't be reached any more ({short(unreachable)}); {advice}")
    if found is None:
        return DamagedFile(f"source {piece.path}: is not there any more")
    return DamagedFile(f"source {piece.path}: is damaged after {where} ({short(error)})")


def _values(column: Any) -> list[Any]:
    """A column's values; a text that is not UTF-8 as bytes."""
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return [_decoded(value) for value in column.cast(pa.large_binary(), safe=False).to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _lines(piece: Piece) -> Iterator[bytes]:
    import pyarrow as pa

    number = 0
    try:
        system, name = filesystem(piece.path)
        # pyarrow takes the compression from the name's ending.
        with system.open_input_stream(name, compression="detect") as handle:
            for line in io.BufferedReader(handle, 1 << 20):  # pyright: ignore[reportArgumentType]
                number += 1
                yield line
    except (OSError, EOFError, pa.ArrowException) as error:
        raise _trouble(piece, f"line {number}", error) from error


def _jsonl(piece: Piece, reading: Reading) -> Iterator[Document | Skipped]:
    for number, line in enumerate(_lines(piece), start=1):
        if line.strip():
            yield _record(line, f"{piece.path}, line {number}", reading)


def _record(line: bytes, where: str, reading: Reading) -> Document | Skipped:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Skipped("not UTF-8", where, f"is not UTF-8 ({short(error)})")
    except ValueError as error:
        return Skipped("not JSON", where, f"is not JSON ({short(error)})")
    columns = reading.columns
    if not isinstance(record, dict):
        return Skipped("not JSON", where, f"is not JSON of the form {{{columns.text!r}: …}}")
    for column in columns.names():
        if column not in record:
            raise UserError(f"source {where}: {missing_column(column, list(record))}")
    text = record[columns.text]
    if text is not None and not isinstance(text, str):
        kind = type(text).__name__
        raise UserError(f"source {where}: column {columns.text!r} holds {kind}, not text; set text_column")
    if b"\\ud" in line and text:
        # JSON can spell half of a character pair, which no UTF-8 text can hold.
        record[columns.text] = text.encode("utf-8", "replace").decode()
    return _document(record, where, reading)


def _text(piece: Piece, reading: Reading) -> Iterator[Document | Skipped]:
    reading = Reading(Columns("text", None), reading.longest, reading.text_files)
    held: list[bytes] = []
    start = 1
    for number, line in enumerate(_lines(piece), start=1):
        whole_file = reading.text_files == "file"
        if held and (reading.text_files == "line" or (not line.strip() and not whole_file)):
            yield _held(held, f"{piece.path}, line {start}", reading)
            held = []
        if line.strip() or whole_file:
            start = start if held else number
            held.append(line)
    if held:
        yield _held(held, f"{piece.path}, line {start}", reading)


def _held(lines: list[bytes], where: str, reading: Reading) -> Document | Skipped:
    return _document({"text": _decoded(b"".join(lines).strip(b"\r\n"))}, where, reading)
