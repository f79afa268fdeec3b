"""Bring downstream datasets into fine-tuning's schemas.

python data_prep/tasks.py yamls/data/tasks.yaml [task ...] [key=value ...] [--plan]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from biphasic.config.errors import ConfigError, UserError
from biphasic.config.load import load
from biphasic.config.tasks import RetrievalData, TasksConfig
from biphasic.storage import join


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """The tasks that were named, all without a name.

    Raises:
        UserError: one isn't in the YAML.
    """
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def plan(config: TasksConfig, names: list[str]) -> str:
    """What will be read and written, from the configuration and the output alone."""
    from biphasic.data.downstream import is_finished

    lines = [f"{len(names)} tasks to {config.output}"]
    for name in names:
        task = config.tasks[name]
        if isinstance(task, RetrievalData):
            tables = [task.corpus, *task.queries, *task.qrels.values(), *([task.train] if task.train else [])]
            sources = list(dict.fromkeys(table.path or "files" for table in tables))
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            sources = [" ".join(filter(None, [task.source.path or "files", task.source.name, task.source.revision]))]
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        done = ", is there already" if is_finished(name, config) else ""
        lines.append(f"  {name:<12} {task.kind}, from {', '.join(sources)}: {', '.join(splits)}{done} [{task.license}]")
    return "\n".join(lines)


def line(name: str, place: str, record: dict[str, Any]) -> str:
    """A finished task in one line."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    out = [f"{count:,} of {file} ({why})" for file, kinds in record["left_out"].items() for why, count in kinds.items()]
    left = f"; left out: {', '.join(out)}" if out else ""
    return f"{name}: {rows} rows{left}; {place} [{record['license']}]"


def main(arguments: list[str] | None = None) -> int:
    """Bring the tasks, one after another; returns the exit status: 1 when some task couldn't be had."""
    parser = argparse.ArgumentParser(description="Bring downstream datasets into fine-tuning's schemas.")
    parser.add_argument("file", help="a job: tasks YAML")
    parser.add_argument("rest", nargs="*", metavar="task | key=value", help="only these; not what the YAML says")
    parser.add_argument("--plan", action="store_true", help="say what would be read and written")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.file, [text for text in given.rest if "=" in text])
        if not isinstance(config, TasksConfig):
            raise UserError(f"{given.file}: job: {config.job}: this command needs job: tasks")
        names = chosen_tasks(config, [text for text in given.rest if "=" not in text])
        print(plan(config, names))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    if given.plan:
        return 0
    from biphasic.data.downstream import convert_task

    failed = []
    for name in names:
        try:
            print(line(name, join(config.output, name), convert_task(name, config)), flush=True)
        except UserError as error:
            print(error if str(error).startswith(name) else f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        print(f"{len(failed)} of {len(names)} tasks failed ({', '.join(failed)}); the same command tries them again",
              file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
