"""`python -m biphasic.report RESULTS`: the tables and figures of a sweep's records so far."""

from __future__ import annotations

import argparse
import sys

from biphasic.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Write the report. Return 0, or 2 if the results can't be read or the report can't be written."""
    parser = argparse.ArgumentParser(prog="python -m biphasic.report", description=__doc__)
    parser.add_argument("results", help="a sweep's output: a folder or a bucket's prefix")
    parser.add_argument(
        "--out", help="the folder to write; default: RESULTS/report, or ./report when RESULTS is in a bucket"
    )
    options = parser.parse_args(arguments)
    try:
        _write_report(options.results, options.out)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _write_report(results: str, out: str | None) -> None:
    from biphasic.report.sweep_report import report_files
    from biphasic.report.sweep_scores import collect_scores
    from biphasic.report.sweep_tables import summary
    from biphasic.storage import first_line, is_remote, join, open_store
    from biphasic.sweep.records import read_grid, read_records

    source = open_store(results)
    grid = read_grid(source)
    sweep = collect_scores(grid, read_records(source, grid.trials))
    folder = out or ("report" if is_remote(results) else join(results, "report"))
    files = report_files(sweep)
    target = open_store(folder)
    try:
        target.remove([name for name, content in files.items() if content is None])
        for name, content in files.items():
            if content is not None:
                target.write(name, content)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({first_line(error)})") from None
    print("\n".join(summary(sweep)))
    print("\n".join(join(folder, name) for name, content in files.items() if content is not None))


if __name__ == "__main__":
    sys.exit(main())
