"""Assemble the files of a sweep's report."""

from __future__ import annotations

from biphasic.report.sweep_csv import differences_csv, results_csv, table_csv
from biphasic.report.sweep_figures import learning_rate_figure, steps_figure
from biphasic.report.sweep_scores import SweepScores
from biphasic.report.sweep_tables import compare_models, details, summary

_CAPTIONS = {
    "learning-rates.png": "Test score against learning rate: mean over seeds, with a band from the lowest to the highest.\n"
    "A hollow point has fewer seeds than the grid.",
    "steps.png": "Test score against pretraining steps: mean and 95% interval over seeds.",
}


def report_files(sweep: SweepScores) -> dict[str, bytes | None]:
    """Return the content of each file by name; None for a figure without data, whose file in an earlier report is stale.

    The same grid and records give the same bytes, regardless of the order in which the records were written.
    """
    comparisons = compare_models(sweep)
    figures = {"learning-rates.png": learning_rate_figure(sweep), "steps.png": steps_figure(sweep)}
    lines = [*summary(sweep), *details(sweep, comparisons)]
    if any(figures.values()):
        lines += ["## Figures", ""]
    for name, content in figures.items():
        if content is not None:
            lines += [f"![{name}]({name})", "", _CAPTIONS[name], ""]
    return {
        "report.md": ("\n".join(lines).rstrip() + "\n").encode(),
        "results.csv": results_csv(sweep),
        "table.csv": table_csv(sweep),
        "differences.csv": differences_csv(comparisons),
        **figures,
    }
