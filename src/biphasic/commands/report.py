"""Write the report of a sweep or a study, or the results of recipes.

biphasic report RESULTS... [--out FOLDER] [--against recipes/paper/reference.csv [--models FILE.yaml]]
biphasic report --results recipes
biphasic report --check recipes/NAME RUN

The exit status is 1 if a checked run differs from its recipe.
"""

from __future__ import annotations

import argparse

from biphasic.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic report`."""
    parser.add_argument(
        "folders",
        metavar="RESULTS",
        nargs="*",
        help="a sweep's output, or a study's folder; several if a study's records and logs are in different places",
    )
    parser.add_argument(
        "--out",
        help="the folder to write; default: `report` within the first local RESULTS, or ./report if all are in buckets",
    )
    parser.add_argument(
        "--against", metavar="CSV", help="published scores to compare with, as recipes/paper/reference.csv"
    )
    parser.add_argument(
        "--models",
        metavar="YAML",
        help="with --against: a file with lines `published model: measured model`, for a study at another scale",
    )
    parser.add_argument("--results", metavar="RECIPES", help="write RECIPES/RESULTS.md from the recipes' results.json")
    parser.add_argument(
        "--check", nargs=2, metavar=("RECIPE", "RUN"), help="compare a run's folder with the recipe's results.json"
    )


def run(options: argparse.Namespace) -> int:
    """Write or check what the options name, and return the exit status."""
    if sum((bool(options.folders), options.results is not None, options.check is not None)) != 1:
        raise UserError("biphasic report: error: expected one of RESULTS, --results and --check")
    if not options.folders and (options.out is not None or options.against is not None):
        raise UserError("biphasic report: error: --out and --against are for the report of RESULTS")
    if options.models is not None and options.against is None:
        raise UserError("biphasic report: error: --models belongs to --against")
    if options.folders:
        from biphasic.report.run import write_report

        write_report(options.folders, options.out, options.against, options.models)
        return 0
    from biphasic.report.recipe_results import check_recipe, write_results_page

    if options.check is not None:
        return 0 if check_recipe(*options.check) else 1
    write_results_page(options.results)
    return 0
