"""Plans of all jobs: `python src/main.py FILE.yaml --plan`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from threading import Thread
from typing import TYPE_CHECKING, Any

from biphasic.commands.parser import argument, positive
from biphasic.ranks import REFUSED

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.plan import JobPlan
    from biphasic.config.pretrain import PretrainConfig


PLAN_SECONDS = 5.0
"""Seconds to wait for records and manifests. Short, because a user waits for the plan and a bucket may not answer."""


PLAN_ARGUMENTS = (
    argument("--plan", action="store_true", help="check everything and print what the job would do"),
    argument("--json", action="store_true", help="with --plan: print JSON"),
    argument("--ranks", type=positive, help="with --plan: number of processes; default: $WORLD_SIZE, or 1"),
)
"""`--plan` and its options."""


def print_plan(config: Config, options: argparse.Namespace) -> int:
    """Print the plan of a job (`options` are `PLAN_ARGUMENTS`) and return the exit status: 2 if it has problems.

    Raises a UserError if the plan can't be made.
    """
    if config.job == "study":
        from biphasic.study.plan import describe_plan, plan_study

        study_plan = plan_study(config)
        print(json.dumps(asdict(study_plan), indent=2) if options.json else describe_plan(study_plan, config.cost))
        return 0
    if config.job == "sweep":
        from biphasic.sweep.plan import plan_sweep

        job_plan = plan_sweep(config)
    elif config.job == "tasks":
        from biphasic.downstream.prepare import plan_tasks

        job_plan = plan_tasks(config, list(config.tasks))
    elif config.job == "finetune":
        from biphasic.finetuning.plan import plan_finetuning

        job_plan = plan_finetuning(config, options.ranks)
    elif config.job == "evaluate":
        from biphasic.evaluation.plan import plan_evaluation

        job_plan = plan_evaluation(config)
    elif config.job == "convert":
        from biphasic.conversion.plan import plan_conversion

        job_plan = plan_conversion(config)
    else:
        job_plan = _pretraining_plan(config, options.ranks)
    return print_job_plan(job_plan, options.json)


def print_job_plan(job_plan: JobPlan, as_json: bool = False) -> int:
    """Print a plan and return the exit status: 2 if it has problems."""
    print(job_plan.to_json() if as_json else job_plan.describe())
    return REFUSED if job_plan.problems else 0


def _pretraining_plan(config: PretrainConfig, ranks: int) -> JobPlan:
    from biphasic.checkpointing.start_rules import ResumeGuard
    from biphasic.config.conversion_checks import RowChecks, check_rows, initial_vocabulary_problem, stored_row_problems
    from biphasic.config.plan import StartPlan, plan
    from biphasic.data.streams import read_conversions
    from biphasic.storage import is_remote

    calls: dict[str, Callable[[], Any]] = {
        "start": ResumeGuard(config).plan_start,
        "rows": lambda: check_rows(config),
        "records": lambda: read_conversions(config.streams),
    }
    late = f"unknown: {config.checkpoint_destination} or start_from did not answer in time"
    results: dict[str, Any] = {"start": StartPlan(unknown=late), "rows": RowChecks(), "records": {}}
    faults = list[str]()

    def run(name: str) -> None:
        try:
            results[name] = calls[name]()
        except Exception as error:
            faults.append(f"{name}: can't be checked ({error})".partition("\n")[0])
            results[name] = None if name == "start" else results[name]

    # Daemon threads, because a bucket may not answer.
    threads = [Thread(target=run, args=(name,), daemon=True) for name in calls]
    deadline = time.monotonic() + PLAN_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    start, checks = results["start"], results["rows"]
    run_plan = plan(config, ranks, results["records"], start)
    run_plan.warnings += checks.warnings
    run_plan.missing += checks.missing
    # Not with the others, because their time may be over before the library that decodes shards is imported.
    local = {key: stream for key, stream in config.splits.items() if not is_remote(stream.remote or stream.local)}
    rows = stored_row_problems(local, config.row_lengths, checks.tokenizer, first_shards=True)
    if start is None or start.checkpoint is None:
        run_plan.problems += filter(None, [initial_vocabulary_problem(config, checks.tokenizer)])
    run_plan.problems += dict.fromkeys([*checks.problems, *rows, *faults])
    return run_plan
