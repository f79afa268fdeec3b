"""Write the report of a sweep or a study, or the results of recipes, and check a run against its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from biphasic.errors import UserError


def write_report(
    folders: list[str], out: str | None = None, against: str | None = None, models: str | None = None
) -> None:
    """Write the report of a sweep or a study, and print its tables.

    Args:
        folders: a sweep's output, or a study's folder or folders.
        out: folder to write; None takes `report` in the first local folder.
        against: published scores to compare with, a CSV.
        models: with `against`, a YAML of `published model: measured model`, for a study at another scale.

    Raises:
        UserError: something can't be read or written.
    """
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


def write_results_page(recipes: str) -> None:
    """Write RESULTS.md in the folder `recipes` from the recipes' results.

    Raises:
        UserError: something can't be read or written.
    """
    from biphasic.report.recipe_results import PAGE, results_page

    _write(recipes, {PAGE: results_page(recipes).encode()})


def check_recipe(recipe: str, run: str) -> bool:
    """Compare a run with its recipe's results, print the comparison, and return whether all are within the tolerances.

    Raises:
        UserError: something can't be read.
    """
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
    return not failed


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
