"""Describe the preparation of downstream datasets as text: its plan, and what it wrote."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphasic.config.tasks import DatasetConfig, RetrievalSet, TasksConfig
from biphasic.downstream.prepare import is_finished
from biphasic.errors import UserError
from biphasic.storage.hub import is_local_path


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """Return the named tasks, or all tasks if none is named.

    Raises:
        UserError: a task is not in the YAML.
    """
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def describe_plan(config: TasksConfig, names: list[str]) -> str:
    """Return what will be read and written, using only the configuration and the output."""
    lines = [f"{len(names)} tasks to {config.output}"]
    for name in names:
        task = config.tasks[name]
        if isinstance(task, RetrievalSet):
            tables = [task.corpus, *task.queries, *task.qrels.values(), *([task.train] if task.train else [])]
            sources = list(dict.fromkeys(table.path or _files(table) for table in tables))
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            tables = [task.source]
            source = task.source
            sources = [" ".join(filter(None, [source.path or _files(source), source.name, source.revision]))]
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        done = ", finished already" if is_finished(name, config) else ""
        lines.append(f"  {name:<12} {task.kind}, from {', '.join(sources)}: {', '.join(splits)}{done} [{task.license}]")
        lines += [] if done else [f"  MISSING      {missing}" for missing in dict.fromkeys(_missing(tables))]
    return "\n".join(lines)


def _files(dataset: DatasetConfig) -> str:
    return ", ".join(pattern for patterns in (dataset.files or {}).values() for pattern in patterns)


def _missing(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Yield what is not on this machine. Datasets on the hub are looked up when they are read."""
    for dataset in datasets:
        if dataset.path is not None:
            if is_local_path(dataset.path) and not Path(dataset.path).is_dir():
                yield f"{dataset.path}: there is no such folder"
            continue
        for patterns in (dataset.files or {}).values():
            for pattern in patterns:
                if not glob.glob(os.path.expanduser(pattern), recursive=True):
                    yield f"{pattern}: there is no such file"


def describe_record(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    left_out = [f"{count:,} of {file} ({reason})"
                for file, reasons in record["left_out"].items() for reason, count in reasons.items()]  # fmt: skip
    suffix = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{name}: {rows} rows{suffix}; {path} [{record['license']}]"
