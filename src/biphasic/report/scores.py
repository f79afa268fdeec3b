"""Test scores of sweeps as one table, and their means by model, with intervals and differences.

Scores are from 0 to 1. A test set belongs to a task group: `SC`, `TC`, `QA`, `IR`, another family's name, or the sweep's
`task_group`.

A seed gives all models the same order of examples and thus some common noise, so models are compared seed by seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from biphasic.report.formatting import MISSING, format_interval, format_seeds
from biphasic.report.statistics import holm, intervals
from biphasic.storage import open_store
from biphasic.sweep.records import Grid, TrialRecord, read_grid, read_records
from biphasic.sweep.selection import choose_rates, planned_trials, score_of, trials_by_group

FAMILIES = {"classification": "SC", "tokens": "TC", "question_answering": "QA", "retrieval": "IR"}
"""Task families with the paper's titles, in its order. Other families follow under their own names."""
TRIAL_COLUMNS = [
    "trial", "model", "group", "trained_on", "task", "test_set", "metric", "lr", "seed", "status", "planned",
    "validation", "test", "seconds", "error", "chosen_lr", "chosen_validation", "settled",
]  # fmt: skip
Column = tuple[str, str]
"""A task group and one of its test sets; an empty test set stands for the group's mean."""


@dataclass(frozen=True)
class ScoreTable:
    """Test scores by model, test set and seed, and the groups' means."""

    scores: pd.DataFrame
    """Columns `model group test_set seed score`. Missing scores are NaN or have no row."""
    means: pd.DataFrame
    """By `model`, `group` and `test_set`: `score half_width seeds settled complete text` and the columns of the test set.

    `settled`: no missing trial could change the chosen rate. `complete`: settled, and every seed has a score."""
    columns: list[Column]
    """For each group, its mean and then its test sets."""
    seeds: int
    """The number of different seeds. A mean over fewer of them is not final."""

    @property
    def groups(self) -> list[Column]:
        """The columns of the groups' means."""
        return [column for column in self.columns if not column[1]]

    def text(self, models: Sequence[str], columns: Sequence[Column]) -> list[list[str]]:
        """Return the formatted means: a list for each model, with an entry for each column."""
        cells = self.means["text"]
        return [[cells.get((model, *column), MISSING) for column in columns] for model in models]


def read_sweep(folder: str) -> tuple[Grid, pd.DataFrame, list[str]]:
    """Read a sweep's grid, its `trial_table` and a line on records of other grids. Raises a UserError if that fails."""
    source = open_store(folder)
    grid = read_grid(source)
    return grid, trial_table(grid, read_records(source, grid.trials)), grid.other_records(source)


def trial_table(grid: Grid, records: Mapping[str, TrialRecord]) -> pd.DataFrame:
    """Return a row for each trial of a grid and each of its test sets, with `TRIAL_COLUMNS`.

    The sweep runs the `planned` trials. The others have learning rates that were not chosen by the first seeds.
    """
    planned, trials, chosen = planned_trials(grid, records), trials_by_group(grid), choose_rates(grid, records)
    rows = []
    groups = {task: grid.task_group or FAMILIES.get(task.family, task.family) for task in grid.tasks}
    for task, group in sorted(groups.items(), key=lambda item: _group_order(item[1])):
        for counts_as, name, metric in task.results:
            for model in grid.models:
                choice = chosen[model, task.name, name]
                for (lr, seed), trial in trials[model, task.name].items():
                    record = records.get(trial)
                    rows.append((
                        *(trial, model, group, task.name, counts_as),
                        *(name, metric, lr, seed, record.status if record else MISSING, trial in planned),
                        *(score_of(record, name, "validation"), score_of(record, name, "test")),
                        *(record.seconds.get("total") if record else None, record.error if record else None),
                        *(choice.lr, choice.validation, choice.complete),
                    ))  # fmt: skip
    table = pd.DataFrame(rows, columns=TRIAL_COLUMNS)
    numbers = ("lr", "validation", "test", "seconds", "chosen_lr", "chosen_validation")
    return table.astype(dict.fromkeys(numbers, float) | {"planned": bool, "settled": bool})


def chosen_scores(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the rows at the chosen rates, with the test score as `score`; NaN for every seed if no rate is chosen.

    `in_mean` is True for those that the group's mean counts: of a task the first test set, by its first metric.
    """
    rows = trials[trials.lr == trials.chosen_lr.fillna(trials.lr.min())]
    in_mean = ~rows.duplicated(["model", "group", "seed", "trained_on", "task"])
    return rows.assign(score=rows.test.where(rows.chosen_lr.notna()), lr=rows.chosen_lr, in_mean=in_mean)


def name_origins(rows: pd.DataFrame) -> pd.DataFrame:
    """Rename test sets of models that were trained on several tasks, such as `nq (from msmarco)`."""
    several = rows.groupby(["group", "test_set"]).trained_on.transform("nunique") > 1
    return rows.assign(test_set=rows.test_set.mask(several, rows.test_set + " (from " + rows.trained_on + ")"))


def score_table(rows: pd.DataFrame, seeds: int | None = None) -> ScoreTable:
    """Return the means of `chosen_scores`. `seeds` is the number of seeds of a sweep, by default that of the rows.

    A group's score with a seed is the mean over the rows of the group's tasks with `in_mean` (MNLI's matched set). It
    exists only if the model has these scores with this seed, so that all models are averaged over the same tasks. A test
    set that belongs to several training tasks counts as a task for each of them.
    """
    rows = name_origins(rows)
    scores = pd.concat([_group_scores(rows), rows])
    by_cell = scores.groupby(["model", "group", "test_set"], sort=False)
    means = intervals(by_cell.score).drop(columns="p").rename(columns={"mean": "score", "count": "seeds"})
    seeds = int(rows.seed.nunique()) if seeds is None else seeds
    about = by_cell[["trained_on", "task", "metric", "lr", "chosen_validation"]].first()
    means = means.join(about).join(by_cell.settled.all())
    means["complete"] = means.settled & (means.seeds == seeds)
    means["text"] = [
        f"{format_interval(row.score, row.half_width)} ({format_seeds(row.seeds, seeds, row.settled)})"
        if row.seeds else MISSING
        for row in means.itertuples()
    ]  # fmt: skip
    groups = sorted(rows.group.unique(), key=_group_order)
    columns = [(group, name) for group in groups for name in ("", *rows.test_set[rows.group == group].unique())]
    return ScoreTable(scores, means, columns, seeds)


def differences(table: ScoreTable, pairs: Sequence[tuple[str, str]], columns: Sequence[Column]) -> pd.DataFrame:
    """Return the differences `first` minus `second` for each pair of models and each column, paired by seed.

    `p_holm` is corrected by Holm's method over all differences. Without a common seed, the numbers are NaN.
    """
    names = ["group", "test_set", "first", "second", "difference", "half_width", "seeds", "p", "settled"]
    parts = []
    for group, test_set in columns:
        of_column = table.scores[(table.scores.group == group) & (table.scores.test_set == test_set)]
        by_seed = of_column.pivot(index="seed", columns="model", values="score")
        settled = of_column.groupby("model").settled.all().to_numpy()
        at = by_seed.columns.get_indexer(np.ravel(pairs)).reshape(-1, 2)
        first, second = at[(at >= 0).all(1)].T
        changes = by_seed.to_numpy().T[first] - by_seed.to_numpy().T[second]
        numbers = intervals(pd.Series(changes.ravel()).groupby(np.arange(changes.size) // len(by_seed))).T.to_numpy()
        named = group, test_set, by_seed.columns[first], by_seed.columns[second]
        parts.append(pd.DataFrame(dict(zip(names, (*named, *numbers, settled[first] & settled[second]), strict=True))))
    compared = pd.concat(parts or [pd.DataFrame(columns=names)], ignore_index=True).astype({"seeds": int})
    return compared.assign(p_holm=holm(compared.p.astype(float)))


def _group_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the groups' scores by model and seed; NaN where a test set has no score."""
    rows = rows[rows.in_mean]
    sets = rows.groupby("group").test_set.nunique()
    settled = rows.groupby(["model", "group"]).settled.all()
    by_seed = rows.groupby(["model", "group", "seed"], sort=False).score.agg(["mean", "count"])
    by_seed = by_seed.reset_index().join(settled, on=["model", "group"])
    score = by_seed.pop("mean").where(by_seed.pop("count") == by_seed.group.map(sets))
    return by_seed.assign(score=score, test_set="", trained_on="", task="", metric="")


def _group_order(group: str) -> tuple[int, str]:
    titles = list(FAMILIES.values())
    return (titles.index(group) if group in titles else len(titles), group)
