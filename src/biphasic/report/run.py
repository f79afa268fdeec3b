"""Write the report of a sweep or a study."""

from __future__ import annotations

from collections.abc import Sequence

from biphasic.report.formatting import html_page
from biphasic.report.reference import COMPARISON_FILES, comparison_files, read_reference
from biphasic.report.scores import chosen_scores, read_sweep, score_table
from biphasic.report.study_folder import read_study
from biphasic.report.study_report import report_files as study_files
from biphasic.report.sweep_report import report_files as sweep_files
from biphasic.storage import is_remote, join, open_store, user_errors
from biphasic.sweep.records import GRID_FILE


def write_report(
    folders: list[str],
    out: str | None = None,
    against: str | None = None,
    models: str | None = None,
    subfolders: Sequence[str] = ("",),
) -> None:
    """Write the report of a sweep's output, or of a study's folder or folders, and print its tables.

    `out` is by default `report` in the first local folder. `against` and `models` are as for `read_reference`, and
    `subfolders` as for `read_study`. Raises a UserError if something can't be read or written.
    """
    # Report an invalid reference before the slower work of the report.
    reference = read_reference(against, models) if against is not None else None
    with user_errors(f"{folders[0]}: can't be read"):
        is_sweep = len(folders) == 1 and open_store(folders[0]).stat(GRID_FILE) is not None
    trials = None
    if is_sweep:
        grid, trials = read_sweep(folders[0])
        files, scores = sweep_files(grid, trials), chosen_scores(trials)
    else:
        study = read_study(folders, subfolders)
        files, scores = study_files(study), study.scores
    files |= dict.fromkeys(COMPARISON_FILES)
    if reference is not None and against is not None:
        table = score_table(scores[scores.score.notna()], scores.seed.nunique())
        files |= comparison_files(against, reference, table, trials)
    # A sweep's differences and the sections after them can be long.
    written = {name: content for name, content in files.items() if content is not None}
    pages = [content.decode() for name, content in written.items() if name.endswith(".md")]
    print("\n".join(page.partition("\n## Differences")[0] for page in pages))
    written["report.html"] = html_page("\n".join(pages), written)
    folder = out or join(next((folder for folder in folders if not is_remote(folder)), ""), "report")
    with user_errors(f"{folder}: can't be written"):
        target = open_store(folder)
        # Files without content may exist from an earlier report.
        target.remove(files.keys() - written.keys())
        for name, content in written.items():
            target.write(name, content)
    print("\n".join(join(folder, name) for name in written))
