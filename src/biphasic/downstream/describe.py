"""Describe the preparation of downstream datasets as text: its plan, and what it wrote."""

from __future__ import annotations

from typing import Any

from biphasic.config.tasks import RetrievalSet, TasksConfig
from biphasic.downstream.prepare import is_finished
from biphasic.errors import UserError


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
            sources = list(dict.fromkeys(table.path or "files" for table in tables))
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            sources = [" ".join(filter(None, [task.source.path or "files", task.source.name, task.source.revision]))]
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        done = ", finished already" if is_finished(name, config) else ""
        lines.append(f"  {name:<12} {task.kind}, from {', '.join(sources)}: {', '.join(splits)}{done} [{task.license}]")
    return "\n".join(lines)


def describe_record(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    left_out = [f"{count:,} of {file} ({reason})"
                for file, reasons in record["left_out"].items() for reason, count in reasons.items()]  # fmt: skip
    suffix = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{name}: {rows} rows{suffix}; {path} [{record['license']}]"
