"""Check whether the machines can run a job, before GPU hours are spent. Started like the run itself, on every node:

composer [node arguments] -m biphasic preflight FILE.yaml [key=value ...]

Prints what is wrong on which node. The exit status is 0 when nothing is, 2 otherwise.
"""

from __future__ import annotations

import argparse

from biphasic.commands.parser import add_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic preflight`."""
    add_file(parser, "job: pretrain or job: finetune")


def run(options: argparse.Namespace) -> int:
    """Check all ranks, print the report on rank 0, and return the exit status."""
    from biphasic.preflight import check

    return check(options.file, options.overrides)
