"""Run the job of a YAML configuration, or check it and print its plan.

composer src/main.py yamls/quickstart.yaml [key=value ...]
python src/main.py yamls/1b_biphasic.yaml --plan [--json] [--ranks N]
python src/main.py yamls/sweep/paper.yaml [--limit N] [--retry-failed]
python src/main.py recipes/paper/study.yaml [--stage pretrain|export|finetune|evaluate|report] [--plan] [--limit N]
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from biphasic.commands.next_step import after_run
from biphasic.commands.parser import Parser, argument, file_arguments, positive
from biphasic.commands.plan import PLAN_ARGUMENTS, print_plan
from biphasic.composer_import import composer_imported
from biphasic.errors import UserError
from biphasic.processes import run_command, set_allocators
from biphasic.ranks import is_first_rank, run_rank

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.study import StudyConfig
    from biphasic.config.sweep import SweepConfig

_STAGES = ("pretrain", "export", "finetune", "evaluate", "report")
"""The stages of a study, in order."""
_ARGUMENTS = (
    argument("--limit", type=positive, metavar="N", help="sweeps and studies: start at most N trials or runs"),
    argument("--retry-failed", action="store_true", help="sweeps: run failed trials again"),
    argument("--stage", choices=_STAGES, help="studies: the stage to run; default: pretrain"),
)
_PLACES = {
    "stage": ("job: study",),
    "limit": ("job: sweep", "job: study", *(f"--stage {stage}" for stage in _STAGES[:-1])),
    "retry_failed": ("job: sweep", "job: study", "--stage finetune"),
    "plan": ("--stage pretrain", "--stage finetune"),
}
"""The jobs and stages of options that not all have."""
_SAME_COMMAND = "next: the same command runs the rest, which --limit left out"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status, as `run_rank` does; also 1 if a trial of a sweep failed."""
    set_allocators()  # before PyTorch is imported, which `run_rank` does if there are several ranks
    return run_rank(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    parser = Parser(prog="main.py", description="Run the job of a YAML, or print its plan.")
    parser.add(*file_arguments("the job"), *PLAN_ARGUMENTS, *_ARGUMENTS)
    options = parser.parse_intermixed_args(arguments)
    # Imported here so that usage messages appear at once.
    from biphasic.config.load import load

    ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    config = load(options.file, options.overrides, ranks)
    _require_place(options, f"job: {config.job}")
    if config.job in ("study", "sweep") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"a {config.job} starts its own processes: run it with python instead of composer")
    for name in ("json", "ranks"):
        if getattr(options, name) and not options.plan:
            raise UserError(f"--{name} belongs to --plan")
    options.ranks = ranks
    if config.job == "study":
        return _study(config, options, options.stage or "pretrain")
    if options.plan:
        return print_plan(config, options)
    if config.job == "sweep":
        status = _sweep(config, options)
        if status == 1:
            print(_next(options, "--retry-failed"))
        elif status == 0:
            print(_SAME_COMMAND if options.limit else after_run(config))
        return status
    folder = _run(config)
    if is_first_rank():
        print(f"written to {folder}\n{after_run(config)}")
    return 0


def _require_place(options: argparse.Namespace, place: str) -> None:
    """Raise a UserError if an option is given that this job (`job: sweep`) or stage (`--stage export`) does not have."""
    kind = place.split()[0]
    for name, places in _PLACES.items():
        fitting = [each for each in places if each.startswith(kind)]
        if getattr(options, name) and fitting and place not in fitting:
            raise UserError(f"--{name.replace('_', '-')} is for {' and '.join(fitting)}; {options.file} is {place}")


def _next(options: argparse.Namespace, *words: str) -> str:
    return f"next: {shlex.join(['python', 'src/main.py', options.file, *options.overrides, *words])}"


def _sweep(config: SweepConfig, options: argparse.Namespace, report: str | None = None) -> int:
    from biphasic.sweep.run import run

    status = run(config, options.limit, options.retry_failed)
    if status in (0, 1):
        from biphasic.report.run import write_report

        try:
            write_report([config.output], report)
        except UserError as error:  # a failed report doesn't change the sweep's exit status
            print(error, file=sys.stderr)
    return status


def _study(config: StudyConfig, options: argparse.Namespace, stage: str) -> int:
    """Run a stage, or print its plan. Pretraining starts the runs that are not done."""
    _require_place(options, f"--stage {stage}")
    if stage == "pretrain" and options.plan:
        return print_plan(config, options)
    if stage == "pretrain":
        from biphasic.study.run import is_trained, pretrain

        status = pretrain(config, options.limit)
        if status == 0 and not options.limit and not is_trained(config):
            print("next: the same command, when these runs are done")
            return status
    elif stage == "report":
        from biphasic.report.run import write_report

        # Logs are local even if checkpoints and the sweep's records are in a bucket. Other runs may have the same `output`.
        in_bucket = config.local_folder != config.folder
        folders = [config.folder, config.local_folder] if in_bucket else [config.folder]
        write_report(folders, f"{config.local_folder}/report", list(config.models) if in_bucket else None)
        return 0
    else:
        from biphasic.study.stages import evaluate, export, sweep_config

        if options.plan:
            return print_plan(sweep_config(config), options)
        if stage == "finetune":
            status = _sweep(sweep_config(config), options, f"{config.local_folder}/sweep/report")
        else:
            status = {"export": export, "evaluate": evaluate}[stage](config, options.limit)
    if status == 0:
        following = next(name for name in _STAGES[_STAGES.index(stage) + 1 :] if getattr(config.stages, name, True))
        print(_SAME_COMMAND if options.limit else _next(options, "--stage", following))
    return status


def _run(config: Config) -> Path:
    # Imported here because PyTorch and Composer take seconds to import, and plans and errors don't need them.
    from biphasic.config.base import RunConfig

    if config.job == "finetune":
        from biphasic.finetuning.plan import require_data

        require_data(config)
    if isinstance(config, RunConfig) and is_first_rank():
        print(f"{config.run_name}: importing PyTorch and Composer", flush=True)
    if config.job not in ("pretrain", "finetune", "evaluate"):
        raise UserError(f"job: {config.job} runs without Composer: biphasic {config.job} FILE.yaml")
    with composer_imported():
        if config.job == "pretrain":
            from biphasic.training.recipe import pretrain as job
        elif config.job == "finetune":
            from biphasic.finetuning.run import run as job
        else:
            from biphasic.evaluation.run import run as job
    return job(config)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    run_command(main)
