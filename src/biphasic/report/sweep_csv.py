"""The numbers of a sweep's report as CSV: scores are shares of 1, and what is missing is an empty field."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from biphasic.report.sweep_scores import Sweep
from biphasic.report.sweep_tables import Compared
from biphasic.sweep.selection import score


def results_csv(sweep: Sweep) -> bytes:
    """A line for each trial of the grid and each test set, with the seconds that the whole trial took."""
    header = ["trial", "model", "trained_on", "task", "name", "family", "lr", "seed", "status", "metric"]
    header += ["validation", "test", "seconds"]
    tasks = {task.name: task for task in sweep.grid.tasks}
    body = []
    for trial, cell in sweep.grid.trials.items():
        record, task = sweep.records.get(trial), tasks[cell.task]
        for counts_as, name, metric in task.results:
            line = [trial, cell.model, cell.task, counts_as, name, task.family, cell.lr, cell.seed, sweep.status(trial)]
            line += [metric, score(record, name, "validation"), score(record, name, "test")]
            body.append([*line, record.seconds.get("total") if record else None])
    return _csv(header, body)


def table_csv(sweep: Sweep) -> bytes:
    """The main table: a line for each model and test set, or family (no `name`).

    `half_width` is of the 95% interval; `settled` says whether the choice of the rate is final.
    """
    header = [
        "model",
        "trained_on",
        "task",
        "name",
        "family",
        "metric",
        "lr",
        "validation",
        "mean",
        "half_width",
        "seeds",
    ]
    header += ["seeds_asked", "settled"]
    body = []
    for model in (model.name for model in sweep.grid.models):
        for row in sweep.rows:
            entry = sweep.entries[model, row]
            choice = sweep.choices[model, row.task, row.name] if row.task is not None else None
            line = [model, row.task, row.counts_as, row.name, row.family, row.metric]
            line += [choice.lr, choice.validation] if choice else [None, None]
            line += [entry.mean.mean, entry.mean.half] if entry.mean else [None, None]
            body.append([*line, len(entry.scores), entry.asked, "yes" if entry.settled else "no"])
    return _csv(header, body)


def differences_csv(compared: Sequence[Compared]) -> bytes:
    """Every difference between two models, `first` less `second`."""
    header = [
        "family",
        "trained_on",
        "name",
        "first",
        "second",
        "difference",
        "half_width",
        "p",
        "p_holm",
        "seeds",
        "settled",
    ]
    body = []
    for one in compared:
        found = one.difference
        numbers = (
            [found.mean, found.half, found.p, one.corrected, found.count] if found else [None, None, None, None, 0]
        )
        line = [one.row.family, one.row.task, one.row.name, one.first, one.second, *numbers]
        body.append([*line, "yes" if one.settled else "no"])
    return _csv(header, body)


def _csv(header: Sequence[str], body: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(body)
    return text.getvalue().encode()
