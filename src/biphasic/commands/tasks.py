"""Prepare downstream datasets in the schemas that fine-tuning reads.

The exit status is 1 if a task failed; the same command tries it again.
"""

from __future__ import annotations

import argparse
import sys

from biphasic.errors import UserError
from biphasic.faults import REFUSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic tasks`."""
    parser.add_argument("file", metavar="FILE.yaml", help="the YAML of job: tasks, e.g. yamls/data/tasks.yaml")
    parser.add_argument(
        "rest", nargs="*", metavar="task | key=value", help="only these tasks; overrides of the YAML's keys"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be read and written")


def run(options: argparse.Namespace) -> int:
    """Prepare the tasks one after another, and return the exit status."""
    from biphasic.config.load import load_job
    from biphasic.config.tasks import TasksConfig

    config = load_job(TasksConfig, options.file, [text for text in options.rest if "=" in text])
    from biphasic.downstream.describe import chosen_tasks, describe_plan, describe_record

    names = chosen_tasks(config, [text for text in options.rest if "=" not in text])
    plan, refused = describe_plan(config, names)
    print(plan)
    if options.plan:
        return REFUSED if refused else 0
    from biphasic.downstream.prepare import prepare_task
    from biphasic.storage import join

    failed = []
    for name in names:
        try:
            print(describe_record(name, join(config.output, name), prepare_task(name, config)), flush=True)
        except UserError as error:
            print(error if str(error).startswith(name) else f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        print(f"{len(failed)} of {len(names)} tasks failed ({', '.join(failed)}); the same command tries them again",
              file=sys.stderr)  # fmt: skip
        return 1
    from biphasic.commands.next_step import after_tasks

    print(after_tasks(config, names))
    return 0
