"""The plan of any job: `python src/main.py FILE.yaml --plan`."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from biphasic.commands.parser import positive
from biphasic.errors import UserError
from biphasic.faults import REFUSED

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.plan import JobPlan
    from biphasic.config.pretrain import PretrainConfig


PLAN_SECONDS = 5.0
"""Maximum time to wait for records and manifests. It is short because a user waits for the plan, and a bucket may not
answer."""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add `--plan` and the options that belong to it."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--plan", action="store_true", help="check everything and print what the job would do")
    parser.add_argument("--json", action="store_true", help="with --plan: print JSON")
    parser.add_argument("--ranks", type=positive, default=ranks, help="with --plan: number of processes of the run")
    parser.add_argument(
        "--memory", action="store_true", help="pretraining, with --plan: rehearse some batches and print their memory"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE.mmd", help="studies, with --plan: draw the tree of runs")


def print_plan(config: Config, options: argparse.Namespace) -> int:
    """Print the plan of a job; the options are those of `add_plan_options`.

    Returns:
        The exit status: 2 if something that can't be made good by other commands would stop the job.

    Raises:
        UserError: the plan can't be made, or an option does not fit the job.
    """
    if options.draw and config.job != "study":
        raise UserError(f"--draw is for studies; this is job: {config.job}")
    if options.memory and config.job != "pretrain":
        raise UserError(f"--memory is for pretraining; this is job: {config.job}")
    if config.job == "pretrain":
        return _print_pretraining(config, options.ranks, options.json, options.memory)
    if config.job == "sweep":
        from biphasic.sweep.plan import as_json, describe_plan, plan_sweep

        sweep_plan = plan_sweep(config)
        print(as_json(sweep_plan) if options.json else describe_plan(sweep_plan))
    elif config.job == "study":
        from biphasic.study.plan import as_json, describe_plan, plan_study

        study_plan = plan_study(config)
        print(as_json(study_plan) if options.json else describe_plan(study_plan, config.cost))
        if options.draw:
            from biphasic.study.draw import draw_study

            options.draw.write_text(draw_study(config), encoding="utf-8")
    elif config.job == "finetune":
        from biphasic.finetuning.plan import plan_finetuning

        return print_job_plan(plan_finetuning(config, options.ranks), options.json)
    elif config.job == "evaluate":
        from biphasic.evaluation.plan import plan_evaluation

        return print_job_plan(plan_evaluation(config), options.json)
    elif config.job == "convert":
        from biphasic.conversion.describe import plan_conversion

        return print_job_plan(plan_conversion(config), options.json)
    elif options.json:
        print(config.model_dump_json(indent=2))
    elif config.job == "tasks":
        from biphasic.downstream.describe import describe_plan

        text, refused = describe_plan(config, list(config.tasks))
        print(text)
        return REFUSED if refused else 0
    return 0


def print_job_plan(job_plan: JobPlan, as_json: bool = False) -> int:
    """Print a plan and return the exit status: 2 if it has problems."""
    print(job_plan.to_json() if as_json else job_plan.describe())
    return REFUSED if job_plan.problems else 0


def _print_pretraining(config: PretrainConfig, ranks: int, as_json: bool, memory: bool) -> int:
    from biphasic.checkpointing.start import plan_start
    from biphasic.config.conversion_record import read_conversions
    from biphasic.config.plan import StartPlan, describe, plan
    from biphasic.data.conversion_checks import RowChecks, check_rows

    results: dict[str, Any] = {}
    calls = {
        "start": lambda: plan_start(config),
        "rows": lambda: check_rows(config),
        "records": lambda: read_conversions(config.data),
    }
    # Daemon threads, because a bucket may not answer.
    threads = [Thread(target=lambda name=name: results.update({name: calls[name]()}), daemon=True) for name in calls]
    deadline = time.monotonic() + PLAN_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    unknown = StartPlan(problem=f"unknown: {config.checkpoint_destination} or start_from did not answer in time")
    start, checks = results.get("start", unknown), results.get("rows", RowChecks())
    run_plan = plan(config, ranks, results.get("records", {}))
    run_plan = replace(
        run_plan,
        start=start,
        warnings=[*run_plan.warnings, *checks.warnings],
        missing=tuple(checks.missing),
        problems=tuple(checks.problems),
    )
    if not memory:
        print(run_plan.to_json() if as_json else describe(run_plan, config))
    else:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Imported here, because a plan otherwise needs neither torch nor Composer, which take seconds to import.
        from biphasic.training.rehearsal import rehearse

        rehearsal = rehearse(config, ranks)
        if as_json:
            print(json.dumps({**json.loads(run_plan.to_json()), "rehearsal": rehearsal.to_dict()}, indent=2))
        else:
            print(f"{describe(run_plan, config)}\n{rehearsal.describe()}")
    return REFUSED if run_plan.problems or start.refused else 0
