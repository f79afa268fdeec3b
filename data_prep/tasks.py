"""Prepare downstream datasets in the schemas that fine-tuning reads.

python data_prep/tasks.py yamls/data/tasks.yaml [task ...] [key=value ...] [--plan]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from biphasic.config.load import load
from biphasic.config.tasks import RetrievalSet, TasksConfig
from biphasic.errors import ConfigError, UserError
from biphasic.storage import join


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """Return the named tasks, or all tasks if none is named.

    Raises:
        UserError: a task is not in the YAML.
    """
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def plan(config: TasksConfig, names: list[str]) -> str:
    """Return what will be read and written, using only the configuration and the output."""
    from biphasic.downstream.prepare import is_finished

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


def line(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    left_out = [f"{count:,} of {file} ({reason})"
                for file, reasons in record["left_out"].items() for reason, count in reasons.items()]  # fmt: skip
    suffix = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{name}: {rows} rows{suffix}; {path} [{record['license']}]"


def main(arguments: list[str] | None = None) -> int:
    """Prepare the tasks one after another, and return the exit status: 1 if any task failed."""
    parser = argparse.ArgumentParser(description="Prepare downstream datasets in fine-tuning's schemas.")
    parser.add_argument("file", help="a job: tasks YAML")
    parser.add_argument(
        "rest", nargs="*", metavar="task | key=value", help="only these tasks; overrides of the YAML's keys"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be read and written")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(options.file, [text for text in options.rest if "=" in text])
        if not isinstance(config, TasksConfig):
            raise UserError(f"{options.file}: job: {config.job}: this command needs job: tasks")
        names = chosen_tasks(config, [text for text in options.rest if "=" not in text])
        print(plan(config, names))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.plan:
        return 0
    from biphasic.downstream.prepare import prepare_task

    failed = []
    for name in names:
        try:
            print(line(name, join(config.output, name), prepare_task(name, config)), flush=True)
        except UserError as error:
            print(error if str(error).startswith(name) else f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        print(f"{len(failed)} of {len(names)} tasks failed ({', '.join(failed)}); the same command tries them again",
              file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
