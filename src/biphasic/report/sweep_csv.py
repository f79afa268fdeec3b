"""Write the numbers of a sweep's report as CSV. Scores are from 0 to 1, and a missing value is an empty field."""

from __future__ import annotations

from collections.abc import Sequence

from biphasic.report.formatting import csv_table
from biphasic.report.sweep_scores import SweepScores
from biphasic.report.sweep_tables import Comparison
from biphasic.sweep.selection import score_of


def results_csv(sweep: SweepScores) -> bytes:
    """Return a line for each trial and test set; `seconds` is the duration of the whole trial."""
    tasks = {task.name: task for task in sweep.grid.tasks}
    rows = []
    for trial, cell in sweep.planned.items():
        record, task = sweep.records.get(trial), tasks[cell.task]
        for counts_as, name, metric in task.results:
            row = [trial, cell.model, cell.task, counts_as, name, task.family, cell.lr, cell.seed, sweep.status(trial)]
            row += [metric, score_of(record, name, "validation"), score_of(record, name, "test")]
            rows.append([*row, record.seconds.get("total") if record else None])
    return csv_table("trial model trained_on task name family lr seed status metric validation test seconds", rows)


def table_csv(sweep: SweepScores) -> bytes:
    """Return the main table, with a line for each model and test set, and for each model and family (without a `name`).

    `half_width` is that of the 95% interval; `settled` tells whether the choice of the rate is final.
    """
    rows = []
    for model in (model.name for model in sweep.grid.models):
        for row in sweep.rows:
            score = sweep.scores[model, row]
            chosen = sweep.chosen[model, row.task, row.name] if row.task is not None else None
            line = [model, row.task, row.counts_as, row.name, row.family, row.metric]
            line += [chosen.lr, chosen.validation] if chosen else [None, None]
            line += [score.interval.mean, score.interval.half] if score.interval else [None, None]
            rows.append([*line, len(score.by_seed), score.expected, "yes" if score.settled else "no"])
    columns = "model trained_on task name family metric lr validation mean half_width seeds seeds_asked settled"
    return csv_table(columns, rows)


def differences_csv(comparisons: Sequence[Comparison]) -> bytes:
    """Return all differences between two models, `first` minus `second`."""
    rows = []
    for comparison in comparisons:
        difference, row = comparison.difference, comparison.row
        line = [row.family, row.task, row.name, comparison.first, comparison.second]
        if difference is None:
            line += [None, None, None, None, 0]
        else:
            line += [difference.mean, difference.half, difference.p, comparison.corrected_p, difference.count]
        rows.append([*line, "yes" if comparison.settled else "no"])
    return csv_table("family trained_on name first second difference half_width p p_holm seeds settled", rows)
