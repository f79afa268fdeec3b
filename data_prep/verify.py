"""Re-read a conversion and compare it with its record: `python data_prep/verify.py OUT [--sample N]`."""

from __future__ import annotations

import argparse
import sys

from biphasic.config.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Verify; returns the exit status: 0 all is right, 1 there are faults, 2 there is nothing to verify."""
    parser = argparse.ArgumentParser(description="Check a conversion against its record: files, hashes, rows, counts.")
    parser.add_argument("output", help="the conversion's folder or s3:// prefix")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N rows as text")
    parser.add_argument("--split", default="train", help="split to take the sample from (default: train)")
    parser.add_argument(
        "--again", type=int, default=0, metavar="N", help="convert N tasks again, and compare the bytes"
    )
    parser.add_argument("--no-sources", action="store_true", help="don't compare with the files that were read")
    chosen = parser.parse_args(arguments)
    from biphasic.data.stored import row_as_text, sample_rows, tokenizer_of
    from biphasic.data.verify import verify

    try:
        result = verify(chosen.output, sources=not chosen.no_sources, again=chosen.again)
        for line in result.summary:
            print(line)
        for fault in result.faults:
            print(f"{chosen.output}: {fault}", file=sys.stderr)
        if chosen.sample and not result.faults:
            tokenizer = tokenizer_of(chosen.output)
            for number, row in sample_rows(chosen.output, chosen.split, chosen.sample):
                print(f"=== {chosen.split}, row {number:,}\n{row_as_text(row, tokenizer)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if not result.faults:
        print(f"{chosen.output}: whole, and as its record says")
    return 1 if result.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
