"""`python -m biphasic.report RESULTS`: tables, intervals, tests and pictures of what a sweep has left so far."""

from __future__ import annotations

import argparse
import sys

from biphasic.config.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 2 something given can't be used."""
    parser = argparse.ArgumentParser(prog="python -m biphasic.report", description=__doc__)
    parser.add_argument("results", help="a sweep's output: a folder or a bucket's")
    parser.add_argument("--out", help="the folder to write; default: RESULTS/report, or report for a bucket's")
    given = parser.parse_args(arguments)
    try:
        _report(given.results, given.out)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _report(results: str, out: str | None) -> None:
    from biphasic.report.sweep_report import report_files
    from biphasic.report.sweep_scores import gather
    from biphasic.report.sweep_tables import summary
    from biphasic.storage import is_remote, join, short, store
    from biphasic.sweep.records import read_grid, read_records

    place = store(results)
    grid = read_grid(place)
    sweep = gather(grid, read_records(place, grid.trials))
    folder = out or ("report" if is_remote(results) else join(results, "report"))
    files = report_files(sweep)
    target = store(folder)
    try:
        target.remove([name for name, content in files.items() if content is None])
        for name, content in files.items():
            if content is not None:
                target.write(name, content)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({short(error)})") from None
    print("\n".join(summary(sweep)))
    print("\n".join(join(folder, name) for name, content in files.items() if content is not None))


if __name__ == "__main__":
    sys.exit(main())
