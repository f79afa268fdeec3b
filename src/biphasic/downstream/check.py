"""Check the first rows of local datasets before they are prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from biphasic.config.tasks import DatasetConfig, TasksConfig
from biphasic.downstream.prepare import WRITERS
from biphasic.downstream.tables import InvalidRow, Table, TableRow, open_table
from biphasic.downstream.writer import Rows
from biphasic.errors import UserError
from biphasic.storage.hub import is_local_path

_ROWS = 100


class _OnHub(Exception):
    """A dataset is on the hub, where nothing is looked up."""


class _FirstRows:
    """Reads the first rows of each table as `TaskWriter` does, and writes nothing."""

    def __init__(self, name: str, config: TasksConfig):
        self.name, self.config = name, config
        self.label_names: list[str] | None = None

    def table(self, config: DatasetConfig, split: str, example: TableRow) -> Table:
        """Return a table's first rows."""
        if config.path is not None and not (is_local_path(config.path) or Path(config.path).is_dir()):
            raise _OnHub
        return open_table(config, split, example, _ROWS)

    def write(self, name: str, schema: str, rows: Rows, total: int) -> None:
        """Refuse rows of which most can't be used. Judgments may name documents that are not among the first ones."""
        checked = list(rows)
        invalid = [row.args for row in checked if isinstance(row, InvalidRow)]
        if schema != "qrels" and len(invalid) > len(checked) / 2:
            kind, position = invalid[0]
            raise UserError(
                f"{name}: {len(invalid)} of the first {len(checked)} rows can't be used: {position}: {kind}"
            )


def find_problem(name: str, config: TasksConfig) -> str | None:
    """Return what would stop the preparation of a task, as far as the first rows of its local data show it; else None."""
    task, first_rows = config.tasks[name], _FirstRows(name, config)
    try:
        write: Any = WRITERS[task.kind]
        write(first_rows, task)
    except UserError as error:
        return str(error)
    except _OnHub:
        return None
    return None
