"""A sweep's report: its files."""

from __future__ import annotations

from biphasic.report.figures import learning_rate_figure, steps_figure
from biphasic.report.sweep_csv import differences_csv, results_csv, table_csv
from biphasic.report.sweep_scores import Sweep
from biphasic.report.sweep_tables import compare, details, summary


def report_files(sweep: Sweep) -> dict[str, bytes | None]:
    """Content by name; None for a picture that there is nothing for, which an earlier report may have left.

    The same grid and records give the same bytes, whenever and in whatever order the records were written.
    """
    compared = compare(sweep)
    pictures = {"learning-rates.png": learning_rate_figure(sweep), "steps.png": steps_figure(sweep)}
    captions = {
        "learning-rates.png": [
            "Test score against learning rate: mean over seeds, and a band from the least to the most. A hollow point rests",
            "on fewer seeds than were asked for.",
        ],
        "steps.png": ["Test score against pretraining steps: mean and 95% interval over seeds."],
    }
    lines = [*summary(sweep), *details(sweep, compared)]
    if any(pictures.values()):
        lines += ["## Pictures", ""]
    for name, content in pictures.items():
        if content is not None:
            lines += [f"![{name}]({name})", "", *captions[name], ""]
    return {
        "report.md": ("\n".join(lines).rstrip() + "\n").encode(),
        "results.csv": results_csv(sweep),
        "table.csv": table_csv(sweep),
        "differences.csv": differences_csv(compared),
        **pictures,
    }
