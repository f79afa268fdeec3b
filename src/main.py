"""Read a YAML, check it, print its plan or run its job.

composer src/main.py yamls/quickstart.yaml [key=value ...]
python src/main.py yamls/1b_biphasic.yaml --plan [--json] [--ranks N]
python src/main.py yamls/sweep/paper.yaml [--limit N] [--retry-failed]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from biphasic.config.errors import UserError
from biphasic.config.load import Config, load
from biphasic.config.plan import describe, describe_other, plan
from biphasic.config.schema import PretrainConfig
from biphasic.config.sweep import SweepConfig
from biphasic.faults import run_together


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run (or one of a sweep's trials) failed, 2 something has to be changed first, 75 stopped on
    request and saved: start it again."""
    return run_together(lambda: _main(arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}")


def _main(arguments: list[str] | None) -> int:
    parser = _Parser(prog="main.py", description="Run what a YAML describes, or print its plan.")
    parser.add_argument("file", help="the YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value, e.g. optimizer.lr=1e-4")
    parser.add_argument("--plan", action="store_true", help="check everything and say what would be done; do nothing")
    parser.add_argument("--json", action="store_true", help="with --plan: for programs")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--ranks", type=int, default=ranks, help="with --plan: processes that the run will have")
    parser.add_argument("--limit", type=_at_least_one, metavar="N", help="of a sweep: begin so many trials at most")
    parser.add_argument("--retry-failed", action="store_true", help="of a sweep: run failed trials again")
    given = parser.parse_intermixed_args(arguments)
    config = load(given.file, given.overrides, given.ranks)
    if isinstance(config, SweepConfig):
        return _sweep(config, given)
    if given.limit is not None or given.retry_failed:
        raise UserError(f"--limit and --retry-failed are for sweeps; {given.file} is job: {config.job}")
    print(_plan(config, given.ranks, given.json) if given.plan else f"written to {_run(config)}")
    return 0


def _plan(config: Config, ranks: int, as_json: bool) -> str:
    if not isinstance(config, PretrainConfig):
        return config.model_dump_json(indent=2) if as_json else describe_other(config)
    found = plan(config, ranks)
    return found.to_json() if as_json else describe(found, config)


def _sweep(config: SweepConfig, given: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a sweep starts its own workers: run it with python instead of composer")
    if not given.plan:
        from biphasic.sweep.run import run

        status = run(config, given.limit, given.retry_failed)
        if status in (0, 1):
            from biphasic.report.__main__ import main as report

            report([config.output])
        return status
    from biphasic.sweep.plan import as_json, describe_plan, plan_sweep

    found = plan_sweep(config)
    print(as_json(found) if given.json else describe_plan(found))
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; got {text!r}")
    return int(text)


def _run(config: Config) -> Path:
    # Imported here: torch and Composer take seconds, which nobody should wait for to read a plan or an error.
    if config.job == "pretrain":
        from biphasic.training.pretrain import run as job
    elif config.job == "finetune":
        from biphasic.finetuning.run import run as job
    elif config.job == "evaluate":
        from biphasic.evaluation.run import run as job
    else:
        raise UserError(f"job: {config.job} runs without Composer: python data_prep/{config.job}.py FILE.yaml")
    return job(config)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
