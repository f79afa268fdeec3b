"""Print keys of the YAMLs: type, limits, default, and what each is.

biphasic keys                       the sections of all jobs
biphasic keys pretrain              all keys of a job
biphasic keys optimizer             a section, in all jobs that have it
biphasic keys finetune.task         a section of one job
biphasic keys optimizer.lr          a key
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic keys`."""
    parser.add_argument("section", metavar="SECTION", nargs="?", default="", help="a job, a section or a key")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the reference's pages, docs/reference")


def run(options: argparse.Namespace) -> int:
    """Print the keys or write the pages, and return the exit status."""
    from biphasic.config.reference import describe_keys, pages

    if options.write is None:
        print(describe_keys(options.section))
        return 0
    options.write.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (options.write / name).write_text(text, encoding="utf-8")
    print(f"{options.write}: {len(pages())} pages")
    return 0
