"""Convert text to MDS shards of packed rows. The same command resumes an interrupted conversion."""

from __future__ import annotations

import argparse
import sys

from biphasic.commands.parser import add_file
from biphasic.commands.plan import print_job_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic convert`."""
    add_file(parser, "job: convert")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be done: files, tokens, bytes, hours, peak disk"
    )


def run(options: argparse.Namespace) -> int:
    """Convert, or print the plan, and return the exit status."""
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.load import load_job

    config = load_job(ConvertConfig, options.file, options.overrides)
    from biphasic.conversion.describe import describe_record, plan_conversion

    if options.plan:
        return print_job_plan(plan_conversion(config))
    from biphasic.commands.next_step import after_conversion
    from biphasic.conversion.convert import convert

    try:
        record = convert(config)
    except KeyboardInterrupt:
        print("interrupted: finished work units are kept; the same command resumes", file=sys.stderr)
        raise
    print(describe_record(config.output, record))
    print(after_conversion(config.output, record))
    return 0
