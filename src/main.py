"""Run the job of a YAML configuration, or check it and print its plan.

composer src/main.py yamls/quickstart.yaml [key=value ...]
python src/main.py yamls/1b_biphasic.yaml --plan [--json] [--ranks N]
python src/main.py yamls/sweep/paper.yaml [--limit N] [--retry-failed]
python src/main.py recipes/paper/study.yaml [--stage pretrain|export|finetune|evaluate|report] [--limit N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import NoReturn

from biphasic.config.data_plan import PLAN_SECONDS
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import Config, load
from biphasic.config.plan import StartPlan, describe, plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.config.sweep import SweepConfig
from biphasic.errors import UserError
from biphasic.faults import REFUSED, run_rank


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    0: done. 1: the run, or a trial of a sweep, failed. 2: something must be changed first. 75: preempted after saving, so
    that the same command resumes the run. 130: interrupted with Ctrl-C.
    """
    return run_rank(lambda: _main(arguments))


_STAGES = ("pretrain", "export", "finetune", "evaluate", "report")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}")


def _main(arguments: list[str] | None) -> int:
    parser = _Parser(prog="main.py", description="Run the job of a YAML, or print its plan.")
    parser.add_argument("file", help="the YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value, e.g. optimizer.lr=1e-4")
    parser.add_argument("--plan", action="store_true", help="check everything and print what the job would do")
    parser.add_argument("--json", action="store_true", help="with --plan: print JSON")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--ranks", type=_positive, default=ranks, help="with --plan: number of processes of the run")
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="sweeps and studies: start at most N trials or runs"
    )
    parser.add_argument("--retry-failed", action="store_true", help="sweeps: run failed trials again")
    parser.add_argument("--stage", choices=_STAGES, help="studies: the stage to run; default: pretrain")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="studies, with --plan: draw the tree of runs")
    options = parser.parse_intermixed_args(arguments)
    config = load(options.file, options.overrides, options.ranks)
    if (options.stage or options.draw) and not isinstance(config, StudyConfig):
        raise UserError(f"--stage and --draw are for studies; {options.file} is job: {config.job}")
    if isinstance(config, StudyConfig):
        return _study(config, options)
    if isinstance(config, SweepConfig):
        return _sweep(config, options)
    if options.limit is not None or options.retry_failed:
        raise UserError(f"--limit and --retry-failed are for sweeps and studies; {options.file} is job: {config.job}")
    if options.plan:
        return _plan(config, options.ranks, options.json)
    print(f"written to {_run(config)}")
    return 0


def _plan(config: Config, ranks: int, as_json: bool) -> int:
    """Print the plan of a job that runs here, and return the exit status: 2 if something would stop it."""
    if isinstance(config, FinetuneConfig | EvaluateConfig):
        from biphasic.evaluation.plan import plan_evaluation
        from biphasic.finetuning.plan import plan_finetuning

        job_plan = plan_finetuning(config, ranks) if isinstance(config, FinetuneConfig) else plan_evaluation(config)
        print(job_plan.to_json() if as_json else job_plan.describe())
        return REFUSED if job_plan.problems else 0
    if not isinstance(config, PretrainConfig):
        raise _other_command(config)
    from biphasic.checkpointing.start import plan_start
    from biphasic.data.conversion_checks import RowChecks, check_rows

    deadline, starts, rows = time.monotonic() + PLAN_SECONDS, list[StartPlan](), list[RowChecks]()
    # Daemon threads, because a bucket may not answer.
    threads = [
        Thread(target=lambda: starts.append(plan_start(config)), daemon=True),
        Thread(target=lambda: rows.append(check_rows(config)), daemon=True),
    ]
    for thread in threads:
        thread.start()
    run_plan = plan(config, ranks)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    start = StartPlan(problem=f"unknown: {config.checkpoint_destination} or start_from did not answer in time")
    start, checks = (starts or [start])[0], (rows or [RowChecks()])[0]
    run_plan = replace(
        run_plan,
        start=start,
        warnings=[*run_plan.warnings, *checks.warnings],
        missing=tuple(checks.missing),
        problems=tuple(checks.problems),
    )
    print(run_plan.to_json() if as_json else describe(run_plan, config))
    return REFUSED if run_plan.problems else 0


def _sweep(config: SweepConfig, options: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a sweep starts its own workers: run it with python instead of composer")
    if not options.plan:
        return _run_sweep(config, options)
    from biphasic.sweep.plan import as_json, describe_plan, plan_sweep

    sweep_plan = plan_sweep(config)
    print(as_json(sweep_plan) if options.json else describe_plan(sweep_plan))
    return 0


def _run_sweep(config: SweepConfig, options: argparse.Namespace) -> int:
    from biphasic.sweep.run import run

    status = run(config, options.limit, options.retry_failed)
    if status in (0, 1):
        from biphasic.report.__main__ import main as report

        report([config.output])
    return status


def _study(config: StudyConfig, options: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a study starts its own runs: run it with python instead of composer")
    if options.draw and not options.plan:
        raise UserError("--draw belongs to --plan")
    if options.plan:
        from biphasic.study.plan import as_json, describe_plan, plan_study

        study_plan = plan_study(config)
        print(as_json(study_plan) if options.json else describe_plan(study_plan, config.cost))
        if options.draw:
            from biphasic.study.draw import draw_study

            options.draw.write_text(draw_study(config), encoding="utf-8")
        return 0
    stage = options.stage or "pretrain"
    if options.retry_failed and stage != "finetune":
        raise UserError("--retry-failed is for --stage finetune, which runs a sweep")
    if stage == "pretrain":
        from biphasic.study.run import pretrain

        return pretrain(config, options.limit)
    if stage == "report":
        from biphasic.report.__main__ import main as report

        if options.limit is not None:
            raise UserError("--limit is for the other stages: a report is of all that is there")
        # Logs and evaluations are local, also if checkpoints and the sweep's records are in a bucket.
        return report(list(dict.fromkeys([config.folder, config.local_folder])))
    from biphasic.study.stages import evaluate, export, sweep_config

    if stage == "finetune":
        return _run_sweep(sweep_config(config), options)
    return {"export": export, "evaluate": evaluate}[stage](config, options.limit)


def _other_command(config: Config) -> UserError:
    return UserError(
        f"job: {config.job} has a command of its own: python data_prep/{config.job}.py FILE.yaml [--plan] [key=value ...]"
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; got {text!r}")
    return int(text)


def _run(config: Config) -> Path:
    # Imported here because torch and Composer take seconds to import, and a plan or an error does not need them.
    if config.job in ("pretrain", "finetune", "evaluate") and os.environ.get("RANK", "0") == "0":
        print(f"{config.run_name}: importing PyTorch and Composer", flush=True)
    if config.job == "pretrain":
        from biphasic.training.pretrain import run as job
    elif config.job == "finetune":
        from biphasic.finetuning.run import run as job
    elif config.job == "evaluate":
        from biphasic.evaluation.run import run as job
    else:
        raise _other_command(config)
    return job(config)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
