"""A downstream set as `data_prep/tasks.py` left it: its record and its tables, from a folder or a bucket."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from biphasic.config.errors import UserError
from biphasic.data.array_cache import locked
from biphasic.data.downstream import RECORD, SCHEMAS
from biphasic.storage import hash_of, is_remote, join, short, store


class TaskFolder:
    """A set's tables by name: `train`, `test`, `corpus`, `qrels/test`, …

    Args:
        place: folder or bucket prefix.
        cache: folder of this machine for what is brought from a bucket.
        kind: what is expected there: `classification`, `tokens`, `question_answering` or `retrieval`.

    Raises:
        UserError: there is no whole set, or one of another kind.
    """

    def __init__(self, place: str, cache: str, kind: str):
        self.place, self._cache = place, cache
        self._files: dict[str, Path] = {}
        try:
            self.record: dict[str, Any] = json.loads(store(place).read(RECORD))
            found = self.record["kind"]
        except FileNotFoundError:
            advice = "make it with data_prep/tasks.py (a folder without this file isn't whole)"
            raise UserError(f"{place}: has no {RECORD}: {advice}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{place}/{RECORD}: can't be read ({short(error)})") from None
        if found != kind:
            raise UserError(f"{place}: holds a {found} set; this task needs a {kind} one")

    @property
    def label_names(self) -> list[str]:
        """In the order of the labels' numbers.

        Raises:
            UserError: the record has none.
        """
        names = self.record.get("label_names")
        if not names:
            raise UserError(f"{self.place}/{RECORD}: names no labels; make it again with data_prep/tasks.py")
        return list(names)

    def mark(self, table: str) -> str:
        """A hash of a table's file."""
        path = self._file(table)
        about = path.stat()
        return _hash(str(path), about.st_size, about.st_mtime_ns)

    def rows(self, table: str) -> int:
        """How many a table has."""
        return self._metadata(table).num_rows

    def characters(self, table: str) -> int:
        """About how many a table's texts have, from its footer: bytes before compression."""
        found = self._metadata(table)
        return sum(found.row_group(at).total_byte_size for at in range(found.num_row_groups))

    def _metadata(self, table: str) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_metadata(self._file(table))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.place}/{table}.parquet: can't be read ({short(error)})") from None

    def read(self, table: str, schema: str) -> dict[str, list[Any]]:
        """A table's columns.

        Args:
            table: its name.
            schema: which of `biphasic.data.downstream.SCHEMAS` it has.

        Raises:
            UserError: it isn't there, lacks a column or has no rows.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = SCHEMAS[schema].names
        try:
            found = pq.read_table(self._file(table))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.place}/{table}.parquet: can't be read ({short(error)})") from None
        for column in columns:
            if column not in found.column_names:
                have = ", ".join(found.column_names)
                raise UserError(f"{self.place}/{table}.parquet: has no column {column!r} (it has: {have})")
        if not found.num_rows:
            raise UserError(f"{self.place}/{table}.parquet: has no rows")
        return {column: found[column].to_pylist() for column in columns}

    def _file(self, table: str) -> Path:
        """On this machine."""
        if table in self._files:
            return self._files[table]
        name = f"{table}.parquet"
        try:
            path = self._brought(name) if is_remote(self.place) else Path(self.place) / name
            there = path is not None and path.is_file()
        except OSError as error:
            raise UserError(f"{self.place}/{name}: can't be read ({short(error)})") from None
        if not there:
            have = [one.removesuffix(".parquet") for one in store(self.place).list() if one.endswith(".parquet")]
            raise UserError(f"{self.place}: has no {table} (it has: {', '.join(have) or 'no tables'})")
        assert path is not None
        self._files[table] = path
        return path

    def _brought(self, name: str) -> Path | None:
        found = store(self.place).stat(name)
        if found is None:
            return None
        mark = hashlib.sha256(f"{join(self.place, name)} {found.version}".encode()).hexdigest()[:24]
        path = Path(self._cache) / "data" / f"{mark}.parquet"
        with locked(path):
            if not path.is_file():
                store(self.place).fetch(name, path)
        return path


@functools.cache
def _hash(path: str, size: int, changed: int) -> str:
    """Remembered while the file stays as it is: a sweep asks thousands of times."""
    return hash_of(Path(path))
