"""Describe the preparation of downstream datasets: what it will do, what would stop it, and what it wrote."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from biphasic.config.tasks import DatasetConfig, RetrievalSet, TasksConfig, source_datasets
from biphasic.downstream.prepare import WRITERS, finished_record
from biphasic.downstream.tables import InvalidRow, Rows, Table, file_patterns, open_table
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
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        paths, sources = [], {}
        for _, dataset, _ in source_datasets("", task):
            read = [dataset.path] if dataset.path else file_patterns(dataset)
            paths += read
            sources[" ".join(filter(None, [", ".join(read), dataset.name, dataset.revision]))] = True
        made = [path for path in paths if is_made_by_jobs(path)]
        missing = [path for path in made if not glob.glob(os.path.expanduser(path), recursive=True)]
        done = finished_record(name, config) is not None
        state = f"{', finished already' if done else ''} [{task.license}]"
        lines.append(f"  {name:<12} {task.kind}, from {', '.join(sources)}: {', '.join(splits)}{state}")
        if done:
            continue
        lines += [f"  MISSING      {path}: there is no such file or folder" for path in missing]
        if not missing and (problem := find_problem(name, config)) is not None:
            lines.append(f"  PROBLEM      {problem}")
            refused = True
    return "\n".join(lines), refused


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


class _FirstRows:
    """Reads the first rows of each table as `TaskWriter` does, and writes nothing."""

    def __init__(self, name: str, config: TasksConfig):
        self.name, self.config = name, config
        self.label_names: list[str] | None = None

    def table(self, config: DatasetConfig, split: str, columns: list[str]) -> Table:
        """Return a table's first rows."""
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
    """Return what would stop the preparation of a task, as far as the first rows of its data show it; else None.

    A task with data from the hub is not checked.
    """
    task, first_rows = config.tasks[name], _FirstRows(name, config)
    paths = [dataset.path for _, dataset, _ in source_datasets("", task) if dataset.path is not None]
    if not all(is_local_path(path) or Path(path).is_dir() for path in paths):
        return None
    try:
        write: Any = WRITERS[task.kind]
        write(first_rows, task)
    except UserError as error:
        return str(error)
    return None
