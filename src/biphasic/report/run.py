"""Write the report of a sweep or a study."""

from collections.abc import Sequence

from biphasic.report.formatting import html_page
from biphasic.report.scores import read_sweep
from biphasic.report.study_folder import read_study
from biphasic.report.study_report import report_files as study_files
from biphasic.report.sweep_report import report_files as sweep_files
from biphasic.storage import is_remote, join, open_store, user_errors
from biphasic.sweep.records import GRID_FILE


def write_report(
    folders: list[str],
    out: str | None = None,
    models: Sequence[str] | None = None,
) -> None:
    """Write the report of a sweep's output, or of a study's folder or folders, and print its tables.

    `out` is by default `report` in the first local folder, and `models` as for `read_study`. Raises a UserError if
    something can't be read or written.
    """
    with user_errors(f"{folders[0]}: can't be read"):
        is_sweep = len(folders) == 1 and open_store(folders[0]).stat(GRID_FILE) is not None
    files = sweep_files(*read_sweep(folders[0])) if is_sweep else study_files(read_study(folders, models))
    written = {name: content for name, content in files.items() if content is not None}
    page = written["report.md"].decode()
    print(page.partition("\n## Differences")[0])  # a sweep's differences and the sections after them can be long
    written["report.html"] = html_page(page, written)
    folder = out or join(next((folder for folder in folders if not is_remote(folder)), ""), "report")
    with user_errors(f"{folder}: can't be written"):
        target = open_store(folder)
        # Files without content may exist from an earlier report.
        target.remove(files.keys() - written.keys())
        for name, content in written.items():
            target.write(name, content)
    print("\n".join(join(folder, name) for name in written))
