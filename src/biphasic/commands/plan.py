"""Check a YAML and print what its job would do, without starting it. `python src/main.py FILE.yaml --plan` does the same."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from biphasic.commands.parser import add_file, positive
from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.pretrain import PretrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic plan`."""
    add_file(parser, "any job")
    add_plan_options(parser, "")


def add_plan_options(parser: argparse.ArgumentParser, condition: str) -> None:
    """Add the options that `biphasic plan` and src/main.py share; `condition` stands before their help."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--json", action="store_true", help=f"{condition}print JSON")
    parser.add_argument("--ranks", type=positive, default=ranks, help=f"{condition}number of processes of the run")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help=f"studies, {condition}draw the tree of runs")


def run(options: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    from biphasic.config.load import load

    print_plan(load(options.file, options.overrides, options.ranks), options)
    return 0


def print_plan(config: Config, options: argparse.Namespace) -> None:
    """Print the plan of a job; the options are those of `add_plan_options`.

    Raises:
        UserError: the plan can't be made, or an option does not fit the job.
    """
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.load import dump
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.config.study import StudyConfig
    from biphasic.config.sweep import SweepConfig
    from biphasic.config.tasks import TasksConfig

    if options.draw and not isinstance(config, StudyConfig):
        raise UserError(f"--draw is for studies; this is job: {config.job}")
    if isinstance(config, PretrainConfig):
        print(_pretraining(config, options.ranks, options.json))
    elif isinstance(config, SweepConfig):
        from biphasic.sweep.plan import as_json, describe_plan, plan_sweep

        sweep_plan = plan_sweep(config)
        print(as_json(sweep_plan) if options.json else describe_plan(sweep_plan))
    elif isinstance(config, StudyConfig):
        from biphasic.study.plan import as_json, describe_plan, plan_study

        study_plan = plan_study(config)
        print(as_json(study_plan) if options.json else describe_plan(study_plan, config.cost))
        if options.draw:
            from biphasic.study.draw import draw_study

            options.draw.write_text(draw_study(config), encoding="utf-8")
    elif options.json:
        print(config.model_dump_json(indent=2))
    elif isinstance(config, ConvertConfig):
        from biphasic.conversion.describe import describe_plan

        print(describe_plan(config))
    elif isinstance(config, TasksConfig):
        from biphasic.downstream.describe import describe_plan

        print(describe_plan(config, list(config.tasks)))
    else:
        print(dump(config))


def _pretraining(config: PretrainConfig, ranks: int, as_json: bool) -> str:
    from biphasic.config.data_plan import PLAN_SECONDS
    from biphasic.config.plan import StartPlan, describe, plan

    deadline, starts = time.monotonic() + PLAN_SECONDS, list[StartPlan]()

    def find_start() -> None:
        from biphasic.checkpointing.start import plan_start

        starts.append(plan_start(config))

    # A daemon thread, because a bucket may not answer.
    thread = Thread(target=find_start, daemon=True)
    thread.start()
    run_plan = plan(config, ranks)
    thread.join(max(0.0, deadline - time.monotonic()))
    unknown = StartPlan(problem=f"unknown: {config.checkpoint_destination} or start_from did not answer in time")
    run_plan = replace(run_plan, start=starts[0] if starts else unknown)
    return run_plan.to_json() if as_json else describe(run_plan, config)
