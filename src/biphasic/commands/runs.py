"""Show a run's checkpoints, its attempts and why each ended, and the tokens lost between them."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic runs`."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="a run's folder, or where it saves: runs/my-run, or s3://bucket/prefix"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    from biphasic.runs import print_report

    print_report(options.folder)
    return 0
