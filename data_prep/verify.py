"""Read a conversion again and compare it with its record: `python data_prep/verify.py OUT [--sample N]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from biphasic.errors import UserError
from biphasic.storage import join


def main(arguments: list[str] | None = None) -> int:
    """Verify, and return the exit status: 0 without faults, 1 with faults, 2 if there is nothing to verify."""
    parser = argparse.ArgumentParser(description="Check a conversion against its record: files, hashes, rows, counts.")
    parser.add_argument("output", help="the conversion's folder or s3:// prefix")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N rows as text")
    parser.add_argument("--split", default="train", help="split of the sample (default: train)")
    parser.add_argument(
        "--again", type=int, default=0, metavar="N", help="convert N work units again, and compare the bytes"
    )
    parser.add_argument("--no-sources", action="store_true", help="don't compare with the files that were read")
    options = parser.parse_args(arguments)
    from biphasic.conversion.verify import verify

    try:
        result = verify(options.output, sources=not options.no_sources, again=options.again)
        for line in result.summary:
            print(line)
        for fault in result.faults:
            print(f"{options.output}: {fault}", file=sys.stderr)
        if options.sample and not result.faults:
            for line in _sample(options.output, options.split, options.sample):
                print(line)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if not result.faults:
        print(f"{options.output}: complete, and as its record says")
    return 1 if result.faults else 0


def _sample(output: str, split: str, count: int) -> Iterator[str]:
    """Yield evenly spaced rows as text."""
    from biphasic.conversion.output import require_record
    from biphasic.data.mds_reader import read_rows, row_as_text
    from biphasic.data.tokenizer import load_tokenizer

    splits = require_record(output)["splits"]
    if split not in splits:
        raise UserError(f"{output}: has no split {split!r}; expected one of {', '.join(splits)}")
    tokenizer = load_tokenizer(join(output, "tokenizer"))
    rows = splits[split]["rows"]
    row_ids = {round(index * (rows - 1) / max(min(count, rows) - 1, 1)) for index in range(min(count, rows))}
    for row_id, row in read_rows(join(output, split), row_ids):
        yield f"=== {split}, row {row_id:,}\n{row_as_text(row, tokenizer)}"


if __name__ == "__main__":
    raise SystemExit(main())
