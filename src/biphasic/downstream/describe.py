"""Describe the preparation of downstream datasets: what it will do, what would stop it, and what it wrote."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphasic.config.tasks import DatasetConfig, RetrievalSet, TasksConfig
from biphasic.downstream.prepare import WRITERS, is_finished
from biphasic.downstream.tables import InvalidRow, Rows, Table, open_table
from biphasic.errors import UserError
from biphasic.storage.hub import is_local_path, is_made_by_jobs

_ROWS = 100
"""Number of first rows of local data that a plan reads."""


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """Return the named tasks, or all tasks if none is named.

    Raises:
        UserError: a task is not in the YAML.
    """
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def describe_plan(config: TasksConfig, names: list[str]) -> tuple[str, bool]:
    """Return what will be read and written, and whether something would stop a task.

    Of local data the first rows are read. Datasets on the hub are looked up when they are prepared.
    """
    refused = False
    lines = [f"{len(names)} tasks to {config.output}"]
    for name in names:
        task = config.tasks[name]
        if isinstance(task, RetrievalSet):
            tables = [task.corpus, *task.queries, *task.qrels.values(), *([task.train] if task.train else [])]
            sources = list(dict.fromkeys(table.path or _files(table) for table in tables))
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            tables, source = [task.source], task.source
            sources = [" ".join(filter(None, [source.path or _files(source), source.name, source.revision]))]
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        done = ", finished already" if is_finished(name, config) else ""
        lines.append(f"  {name:<12} {task.kind}, from {', '.join(sources)}: {', '.join(splits)}{done} [{task.license}]")
        missing = [] if done else list(_missing(tables))
        lines += [f"  MISSING      {path}: there is no such file or folder" for path in missing]
        problem = None if done or missing else find_problem(name, config)
        lines += [] if problem is None else [f"  PROBLEM      {problem}"]
        refused = refused or problem is not None
    return "\n".join(lines), refused


def _missing(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield the paths that are not there and that other commands make."""
    for dataset in datasets:
        patterns = [pattern for patterns in (dataset.files or {}).values() for pattern in patterns]
        for path in [dataset.path] if dataset.path else patterns:
            if is_made_by_jobs(path) and not glob.glob(os.path.expanduser(path), recursive=True):
                yield path


def _files(dataset: DatasetConfig) -> str:
    return ", ".join(pattern for patterns in (dataset.files or {}).values() for pattern in patterns)


def describe_record(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    remarks = ""
    for key, words in (("left_out", "left out"), ("not_used", "not used")):
        counts = [f"{count:,} of {file} ({reason})"
                  for file, reasons in record[key].items() for reason, count in reasons.items()]  # fmt: skip
        remarks += f"; {words}: {', '.join(counts)}" if counts else ""
    warnings = [f"\n  WARNING: {warning}" for warning in record["warnings"]]
    return f"{name}: {rows} rows{remarks}; {path} [{record['license']}]{''.join(warnings)}"


class _OnHub(Exception):
    """A dataset is on the hub, where nothing is looked up."""


class _FirstRows:
    """Reads the first rows of each table as `TaskWriter` does, and writes nothing."""

    def __init__(self, name: str, config: TasksConfig):
        self.name, self.config = name, config
        self.label_names: list[str] | None = None

    def table(self, config: DatasetConfig, split: str, columns: list[str]) -> Table:
        """Return a table's first rows."""
        if config.path is not None and not (is_local_path(config.path) or Path(config.path).is_dir()):
            raise _OnHub
        return open_table(config, split, columns, _ROWS)

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
