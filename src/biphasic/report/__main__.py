"""Write the report of a sweep or a study, or the results of recipes.

python -m biphasic.report RESULTS... [--out FOLDER] [--against recipes/paper/reference.csv [--models FILE.yaml]]
python -m biphasic.report --results recipes
python -m biphasic.report --check recipes/NAME RUN
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from biphasic.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0, 1 if a checked run differs from its recipe, or 2 if something can't be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m biphasic.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders",
        metavar="RESULTS",
        nargs="*",
        help="a sweep's output, or a study's folder or folders (its bucket's prefix, and its output on this machine)",
    )
    parser.add_argument(
        "--out",
        help="the folder to write; default: report in the first local RESULTS, or ./report when all are in buckets",
    )
    parser.add_argument(
        "--against", metavar="CSV", help="published scores to compare with, as recipes/paper/reference.csv"
    )
    parser.add_argument(
        "--models",
        metavar="YAML",
        help="with --against: lines of `published model: measured model`, for a study at another scale",
    )
    parser.add_argument("--results", metavar="RECIPES", help="write RECIPES/RESULTS.md from the recipes' results.json")
    parser.add_argument(
        "--check", nargs=2, metavar=("RECIPE", "RUN"), help="compare a run's folder with the recipe's results.json"
    )
    options = parser.parse_args(arguments)
    if sum((bool(options.folders), options.results is not None, options.check is not None)) != 1:
        parser.error("expected one of RESULTS, --results and --check")
    if not options.folders and (options.out is not None or options.against is not None):
        parser.error("--out and --against are for the report of RESULTS")
    if options.models is not None and options.against is None:
        parser.error("--models belongs to --against")
    try:
        if options.results is not None:
            _write_results_page(options.results)
        elif options.check is not None:
            return _check(*options.check)
        else:
            _write_report(options.folders, options.out, options.against, options.models)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _write_report(folders: list[str], out: str | None, against: str | None, models: str | None) -> None:
    from biphasic.report.reference import COMPARISON_FILES, comparison_files, in_place_of, read_reference
    from biphasic.report.study_folder import is_study, read_study
    from biphasic.report.study_scores import rows_of_sweep, score_table
    from biphasic.report.sweep_scores import collect_scores
    from biphasic.storage import is_remote, join, open_store
    from biphasic.sweep.records import read_grid, read_records

    # A wrong reference must be reported before the report, which takes longer.
    reference = read_reference(against) if against is not None else None
    if reference is not None and models is not None:
        reference = in_place_of(reference, models)
    if len(folders) == 1 and not is_study(folders[0]):
        from biphasic.report.sweep_report import report_files as sweep_files
        from biphasic.report.sweep_tables import summary

        source = open_store(folders[0])
        grid = read_grid(source)
        sweep = collect_scores(grid, read_records(source, grid.trials))
        files, rows, shown = sweep_files(sweep), rows_of_sweep(sweep), "\n".join(summary(sweep))
    else:
        from biphasic.report.study_report import report_files as study_files

        study = read_study(folders)
        files, rows = study_files(study), study.rows
        shown = (files["report.md"] or b"").decode()
    files |= dict.fromkeys(COMPARISON_FILES)
    if reference is not None and against is not None:
        compared = comparison_files(against, reference, score_table(rows))
        files |= compared
        shown += "\n" + compared["against.md"].decode()
    print(shown)
    local = next((folder for folder in folders if not is_remote(folder)), "")
    _write(out or join(local, "report"), files)


def _write_results_page(recipes: str) -> None:
    from biphasic.report.recipe_results import PAGE, results_page

    _write(recipes, {PAGE: results_page(recipes).encode()})


def _check(recipe: str, run: str) -> int:
    from biphasic.report.recipe_results import check_run, check_table, read_results

    results = read_results(recipe)
    checked = check_run(results, run)
    print(f"{run} against {recipe} (commit {results.commit[:7]}, {results.hardware})\n")
    print("\n".join(check_table(checked)))
    failed = [number.name for number in checked if number.verdict in ("differs", "missing")]
    print(
        f"\n{len(failed)} of {len(checked)} numbers are not within the tolerance"
        if failed
        else "\nwithin the tolerances"
    )
    return 1 if failed else 0


def _write(folder: str, files: Mapping[str, bytes | None]) -> None:
    """Write the files with content, remove those without, and print the names of those that are written."""
    from biphasic.storage import first_line, join, open_store

    target = open_store(folder)
    try:
        target.remove([name for name, content in files.items() if content is None])
        for name, content in files.items():
            if content is not None:
                target.write(name, content)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({first_line(error)})") from None
    print("\n".join(join(folder, name) for name, content in files.items() if content is not None))


if __name__ == "__main__":
    sys.exit(main())
