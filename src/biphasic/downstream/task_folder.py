"""Read a prepared downstream dataset, its record and its tables, from a folder or a bucket."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from biphasic.downstream.array_cache import locked
from biphasic.downstream.writer import SCHEMAS, TASK_RECORD
from biphasic.errors import UserError
from biphasic.storage import cached_file_hash, first_line, is_remote, join, open_store


class TaskFolder:
    """The tables of a prepared dataset, by name: `train`, `test`, `corpus`, `qrels/test`, …

    Args:
        path: folder or bucket prefix of the dataset.
        cache: local folder for downloaded files.
        kind: expected kind: `classification`, `tokens`, `question_answering` or `retrieval`.

    Raises:
        UserError: there is no complete dataset, or it has another kind.
    """

    def __init__(self, path: str, cache: str, kind: str):
        self.path, self._cache = path, cache
        self._files: dict[str, Path] = {}
        try:
            self.record: dict[str, Any] = json.loads(open_store(path).read(TASK_RECORD))
            recorded_kind = self.record["kind"]
        except FileNotFoundError:
            advice = "make it with `biphasic tasks` (a folder without this file isn't complete)"
            raise UserError(f"{path}: has no {TASK_RECORD}: {advice}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}/{TASK_RECORD}: can't be read ({first_line(error)})") from None
        if recorded_kind != kind:
            raise UserError(f"{path}: holds a {recorded_kind} set; this task needs a {kind} one")

    @property
    def label_names(self) -> list[str]:
        """Return the labels' names in the order of their numbers.

        Raises:
            UserError: the record has no label names.
        """
        names = self.record.get("label_names")
        if not names:
            raise UserError(f"{self.path}/{TASK_RECORD}: names no labels; make it again with `biphasic tasks`")
        return list(names)

    def content_hash(self, table: str) -> str:
        """Return a hash of a table's file."""
        return cached_file_hash(self._file(table))

    def rows(self, table: str) -> int:
        """Return the number of rows in a table."""
        return self._metadata(table).num_rows

    def characters(self, table: str) -> int:
        """Return the approximate number of characters in a table's texts: its bytes before compression."""
        metadata = self._metadata(table)
        return sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))

    def _metadata(self, table: str) -> Any:
        import pyarrow.parquet as pq

        return self._open(table, pq.read_metadata)

    def _open(self, table: str, read: Any) -> Any:
        import pyarrow as pa

        try:
            return read(self._file(table))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.path}/{table}.parquet: can't be read ({first_line(error)})") from None

    def read(self, table: str, schema: str) -> dict[str, list[Any]]:
        """Return a table's columns.

        Args:
            table: name of the table.
            schema: key of its schema in `biphasic.downstream.prepare.SCHEMAS`.

        Raises:
            UserError: the table is missing, lacks a column or has no rows.
        """
        import pyarrow.parquet as pq

        content = self._open(table, pq.read_table)
        for column in SCHEMAS[schema].names:
            if column not in content.column_names:
                existing = ", ".join(content.column_names)
                raise UserError(f"{self.path}/{table}.parquet: has no column {column!r} (it has: {existing})")
        if not content.num_rows:
            raise UserError(f"{self.path}/{table}.parquet: has no rows")
        return {column: content[column].to_pylist() for column in SCHEMAS[schema].names}

    def _file(self, table: str) -> Path:
        """Return the local path of a table's file, which is downloaded if necessary."""
        if table not in self._files:
            name = f"{table}.parquet"
            try:
                path = self._download(name) if is_remote(self.path) else Path(self.path) / name
                exists = path is not None and path.is_file()
            except OSError as error:
                raise UserError(f"{self.path}/{name}: can't be read ({first_line(error)})") from None
            if path is None or not exists:
                files = open_store(self.path).list()
                tables = ", ".join(file.removesuffix(".parquet") for file in files if file.endswith(".parquet"))
                raise UserError(f"{self.path}: has no {table} (it has: {tables or 'no tables'})")
            self._files[table] = path
        return self._files[table]

    def _download(self, name: str) -> Path | None:
        store = open_store(self.path)
        remote_file = store.stat(name)
        if remote_file is None:
            return None
        digest = hashlib.sha256(f"{join(self.path, name)} {remote_file.version}".encode()).hexdigest()[:24]
        path = Path(self._cache) / "data" / f"{digest}.parquet"
        with locked(path):
            if not path.is_file():
                store.download(name, path)
        return path
