"""Read a conversion again and compare it with its record: files, hashes, rows, counts.

The exit status is 0 without faults, 1 with faults, 2 if there is nothing to verify.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from biphasic.commands.parser import count
from biphasic.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic verify`."""
    parser.add_argument("output", metavar="OUT", help="the conversion's folder or bucket prefix")
    parser.add_argument("--sample", type=count, default=0, metavar="N", help="print N rows as text")
    parser.add_argument("--split", default="train", help="split of the sample (default: train)")
    parser.add_argument(
        "--again", type=count, default=0, metavar="N", help="convert N work units again, and compare the bytes"
    )
    parser.add_argument("--no-sources", action="store_true", help="don't compare with the files that were read")


def run(options: argparse.Namespace) -> int:
    """Verify, print the counts and the faults, and return the exit status."""
    from biphasic.conversion.verify import verify

    result = verify(options.output, sources=not options.no_sources, again=options.again)
    for line in result.summary:
        print(line)
    for fault in result.faults:
        print(f"{options.output}: {fault}", file=sys.stderr)
    if result.faults:
        return 1
    if options.sample:
        for line in _sample(options.output, options.split, options.sample):
            print(line)
    print(f"{options.output}: complete, and as its record says")
    from biphasic.commands.next_step import after_conversion
    from biphasic.conversion.output import require_record

    print(after_conversion(options.output, require_record(options.output)))
    return 0


def _sample(output: str, split: str, number: int) -> Iterator[str]:
    """Yield evenly spaced rows as text."""
    from biphasic.conversion.output import require_record
    from biphasic.data.mds_reader import read_rows, row_as_text
    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.storage import join

    splits = require_record(output)["splits"]
    if split not in splits:
        raise UserError(f"{output}: has no split {split!r}; expected one of {', '.join(splits)}")
    tokenizer = load_tokenizer(join(output, "tokenizer"))
    rows = splits[split]["rows"]
    row_ids = {round(index * (rows - 1) / max(min(number, rows) - 1, 1)) for index in range(min(number, rows))}
    for row_id, row in read_rows(join(output, split), row_ids):
        yield f"=== {split}, row {row_id:,}\n{row_as_text(row, tokenizer)}"
