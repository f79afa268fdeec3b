"""Read a prepared downstream dataset, its record and its tables, from a folder or a bucket."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from pyarrow import parquet

from biphasic.downstream.writer import SCHEMAS, TASK_RECORD
from biphasic.errors import Missing, UserError, first_line
from biphasic.storage import cached_file_hash, is_remote, join, open_store, user_errors


class TaskFolder:
    """The tables of a prepared dataset, by name: `train`, `test`, `corpus`, `qrels/test`, …

    `path` is a folder or a bucket prefix, and `cache` a local folder for downloaded files. `record` is the content of
    the dataset's record, if no table is read; by default, it is read from `path`. A `kind` of None stands for any.
    Raises a UserError if there is no complete dataset, or its kind is not `kind`. It names `key`, where `path` comes from.
    """

    def __init__(self, path: str, cache: str, kind: str | None, record: dict[str, Any] | None = None, key: str = ""):
        self.path, self._cache = path, cache
        self._files: dict[str, Path] = {}
        try:
            self.record: dict[str, Any] = record or json.loads(open_store(path).read(TASK_RECORD))
            self.kind: str = self.record["kind"]
        except FileNotFoundError:
            advice = "make it with `biphasic tasks` (a folder without this file isn't complete)"
            if is_gone := not is_remote(path) and not Path(path).exists():
                advice = "expected one that `biphasic tasks` made"
            problem = "there is no such folder" if is_gone else f"has no {TASK_RECORD}"
            raise Missing(f"{key} {path}: {problem}: {advice}".lstrip()) from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}/{TASK_RECORD}: can't be read ({first_line(error)})") from None
        if kind not in (self.kind, None):
            problem = f"is a dataset of kind {self.kind}; expected {kind}{', the task.kind' if key else ''}"
            raise UserError(f"{key} {path}: {problem}".lstrip())

    @property
    def label_names(self) -> list[str]:
        """The labels' names in the order of their numbers; a UserError if the record has none."""
        if not (names := self.record.get("label_names")):
            raise UserError(f"{self.path}/{TASK_RECORD}: has no label names; prepare it again with `biphasic tasks`")
        return list(names)

    def content_hash(self, table: str) -> str:
        """Return a hash of a table's file."""
        return self._open(table, cached_file_hash)

    def row_count(self, table: str) -> int:
        """Return a table's number of rows."""
        return self._open(table, parquet.read_metadata).num_rows

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns."""
        return self._open(table, parquet.read_schema).names

    def null_count(self, table: str, column: str) -> int:
        """Return the number of rows without a value in a column."""
        return self._select(table, [column])[column].null_count

    def list_lengths(self, table: str, column: str) -> list[int]:
        """Return the length of each row's list in a column; 0 for null."""
        lists = self._select(table, [column])[column]
        return [length or 0 for length in pc.list_value_length(lists).to_pylist()]  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, table: str, schema: str) -> dict[str, list[Any]]:
        """Return the columns of a table; `schema` is a key of `biphasic.downstream.writer.SCHEMAS`.

        Raises a UserError if the table is missing, lacks a column or has no rows.
        """
        content = self._select(table, SCHEMAS[schema].names)
        if not content.num_rows:
            raise UserError(f"{self.path}/{table}.parquet: has no rows")
        return content.to_pydict()

    def _select(self, table: str, columns: list[str]) -> pa.Table:
        existing = self.columns(table)
        if missing := [column for column in columns if column not in existing]:
            raise UserError(f"{self.path}/{table}.parquet: has no column {missing[0]!r} (it has: {', '.join(existing)})")
        return self._open(table, functools.partial(parquet.read_table, columns=columns))

    def _open(self, table: str, read: Callable[[Path], Any]) -> Any:
        with user_errors(f"{self.path}/{table}.parquet: can't be read", pa.ArrowException):
            return read(self.file(table))

    def file(self, table: str) -> Path:
        """Return the local path of a table's file, downloading it if necessary."""
        if table in self._files:
            return self._files[table]
        store, name = open_store(self.path), f"{table}.parquet"
        stored, path = store.stat(name), Path(self.path) / name
        if stored is None:
            tables = [file.removesuffix(".parquet") for file in store.list() if file.endswith(".parquet")]
            raise UserError(f"{self.path}: has no {table} (it has: {', '.join(tables) or 'no tables'})")
        if is_remote(self.path):
            digest = hashlib.sha256(f"{join(self.path, name)} {stored.version}".encode()).hexdigest()[:24]
            path = Path(self._cache) / "data" / f"{digest}.parquet"
            with FileLock(f"{path}.lock"):
                if not path.is_file():
                    store.download(name, path)
        self._files[table] = path
        return path
