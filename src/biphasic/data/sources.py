"""Documents from where they lie: Parquet and JSONL files in folders and buckets, datasets of the hub."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from biphasic.config.conversion import FilesSource, HubSource
from biphasic.config.errors import UserError
from biphasic.data.storage import filesystem, is_remote, short

_ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
_BATCH = 1000


class Document(NamedTuple):
    """A text and what names it."""

    id: str
    text: str


@dataclass(frozen=True)
class Columns:
    """Where a record keeps its text and its id; without `id`, a hash of the text names the document."""

    text: str
    id: str | None

    def names(self) -> list[str]:
        """The columns to read."""
        return [self.text] if self.id is None else [self.text, self.id]

    def document(self, text: str, id: object) -> Document:
        """A record's document."""
        if self.id is None:
            id = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return Document(str(id), text)


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and its size in bytes."""

    path: str
    bytes: int


def find_files(source: FilesSource) -> list[SourceFile]:
    """The files that a source names, each once, sorted by path.

    Raises:
        UserError: a path, folder or pattern gives no file, or one of a kind that can't be read.
    """
    found: dict[str, int] = {}
    for path in source.paths:
        files = _files_of(path)
        if not files:
            kinds = ", ".join(_ENDINGS)
            raise UserError(
                f"source {path}: there is no such file, and no folder or pattern with files in it ({kinds})"
            )
        found.update(files)
    return [SourceFile(path, size) for path, size in sorted(found.items())]


def _files_of(path: str) -> dict[str, int]:
    """Path and size of each file that `path` means."""
    from pyarrow.fs import FileSelector, FileType

    system, name = filesystem(path)
    scheme = "s3://" if is_remote(path) else ""
    pattern = any(sign in name for sign in "*?[")
    try:
        if pattern and not scheme:
            infos = system.get_file_info(sorted(glob.glob(name, recursive=True)))
        elif pattern:
            fixed = re.split(r"[*?\[]", name)[0].rpartition("/")[0]
            matches = re.compile(_regex(name)).fullmatch
            everything = system.get_file_info(FileSelector(fixed, recursive=True, allow_not_found=True))
            infos = [info for info in everything if matches(info.path)]
        else:
            [info] = system.get_file_info([name.rstrip("/")])
            if info.type == FileType.File and not name.endswith(_ENDINGS):
                raise UserError(f"source {path}: expected a file that ends in {', '.join(_ENDINGS)}")
            folder = FileSelector(info.path, recursive=True)
            infos = system.get_file_info(folder) if info.type == FileType.Directory else [info]
    except OSError as error:
        raise UserError(f"source {path}: can't be read ({short(error)})") from None
    return {
        scheme + info.path: info.size
        for info in infos
        if info.type == FileType.File and info.path.endswith(_ENDINGS) and not Path(info.path).name.startswith(".")
    }


def _regex(pattern: str) -> str:
    """A glob pattern as a regular expression: `**/` is any folders, `*` and `?` stay within one."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^\]]*\])", pattern)
    signs = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(signs.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)


def count_documents(files: list[SourceFile], columns: Columns) -> int | None:
    """Look at each file before the work begins: is it there, is it whole at both ends, has it the columns?

    Returns:
        How many documents the files hold; None when that can't be known without reading them (JSONL).

    Raises:
        UserError: naming the first file that can't be used.
    """
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(lambda file: _look_at(file, columns), files))
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _look_at(file: SourceFile, columns: Columns) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.bytes == 0:
        raise UserError(f"source {file.path}: is empty (0 bytes)")
    if not file.path.endswith(".parquet"):
        return None
    system, name = filesystem(file.path)
    try:
        with system.open_input_file(name) as handle:
            metadata = pq.ParquetFile(handle)
            schema, rows = metadata.schema_arrow, metadata.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"source {file.path}: is no whole Parquet file ({short(error)})") from None
    for column in columns.names():
        if column not in schema.names:
            raise UserError(_missing(file.path, column, schema.names))
    kind = schema.field(columns.text).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"source {file.path}: column {columns.text!r} holds {kind}, not text; set text_column")
    return rows


def read_files(files: list[SourceFile], columns: Columns) -> Iterator[Document]:
    """All documents of the files, in order; a record whose text is null or empty is an empty document.

    Raises:
        UserError: naming the file (and line) that can't be read.
    """
    for file in files:
        yield from _parquet(file, columns) if file.path.endswith(".parquet") else _jsonl(file, columns)


def _parquet(file: SourceFile, columns: Columns) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    system, name = filesystem(file.path)
    try:
        with system.open_input_file(name) as handle:
            for batch in pq.ParquetFile(handle, page_checksum_verification=True).iter_batches(
                _BATCH, columns=columns.names()
            ):
                texts = batch.column(columns.text).to_pylist()
                ids = texts if columns.id is None else batch.column(columns.id).to_pylist()
                for text, id in zip(texts, ids, strict=True):
                    yield columns.document(text or "", id)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"source {file.path}: is damaged ({short(error)})") from None


def _jsonl(file: SourceFile, columns: Columns) -> Iterator[Document]:
    import pyarrow as pa

    system, name = filesystem(file.path)
    number = 0
    try:
        # pyarrow takes the compression from the name's ending.
        with system.open_input_stream(name, compression="detect") as handle:
            for number, line in enumerate(io.TextIOWrapper(handle, encoding="utf-8"), start=1):
                if line.strip():
                    yield _record(line, f"source {file.path}, line {number}", columns)
    except (OSError, EOFError, UnicodeDecodeError, pa.ArrowException) as error:
        raise UserError(f"source {file.path}: is damaged after line {number} ({short(error)})") from None


def _record(line: str, where: str, columns: Columns) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({short(error)})") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with the column {columns.text!r}")
    for column in columns.names():
        if column not in record:
            raise UserError(_missing(where.removeprefix("source "), column, list(record)))
    text = record[columns.text]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: column {columns.text!r} holds {type(text).__name__}, not text; set text_column")
    if "\\ud" in line and text:
        # JSON can spell half of a character pair, which no UTF-8 text can hold.
        text = text.encode("utf-8", "replace").decode()
    return columns.document(text or "", record.get(columns.id) if columns.id else None)


def read_hub(source: HubSource, columns: Columns) -> Iterator[Document]:
    """All documents of a hub dataset, streamed.

    Raises:
        UserError: it can't be reached, or has no such configuration, split or column.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    name = source.path if source.name is None else f"{source.path}, {source.name}"
    try:
        dataset = datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=True
        )
        for batch in dataset.iter(_BATCH):  # pyright: ignore[reportAttributeAccessIssue]
            yield from _hub_batch(batch, columns, name)
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(f"source {name}: can't be read from the hub ({short(error)})") from None


def _hub_batch(batch: dict[str, list[Any]], columns: Columns, name: str) -> Iterator[Document]:
    for column in columns.names():
        if column not in batch:
            raise UserError(_missing(name, column, list(batch)))
    texts = batch[columns.text]
    ids = texts if columns.id is None else batch[columns.id]
    for text, id in zip(texts, ids, strict=True):
        yield columns.document(text or "", id)


def _missing(where: str, column: str, there: list[str]) -> str:
    key = "set text_column or id_column"
    return f"source {where}: has no column {column!r} (it has: {', '.join(sorted(there))}); {key}"
