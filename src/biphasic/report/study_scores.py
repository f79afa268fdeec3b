"""The scores of a study as one plain table, and their means by model, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from biphasic.report.statistics import Difference, Interval, holm, mean_interval, paired_difference
from biphasic.report.sweep_scores import FAMILIES, SweepScores


@dataclass(frozen=True)
class ScoreRow:
    """A test score of a model at its chosen learning rate."""

    model: str
    group: str
    """The task group: `SC`, `TC`, `QA`, `IR`, or another family's name."""
    task: str
    """The task as counted in a group's mean, in which MNLI's two test sets are one task."""
    test_set: str
    seed: int
    score: float
    """From 0 to 1."""
    settled: bool = True
    """Whether no missing trial could change the chosen rate."""
    trained_on: str = ""
    """The task that the model was fine-tuned on."""


@dataclass(frozen=True)
class Column:
    """A group's mean, or one of its test sets."""

    group: str
    task: str = ""
    """Empty for the group's mean."""
    test_set: str = ""

    @property
    def title(self) -> str:
        """The column's title in tables and figures."""
        return self.test_set or self.group


@dataclass(frozen=True)
class SeedScores:
    """A model's scores in a column."""

    by_seed: dict[int, float] = field(default_factory=dict)
    """Scores from 0 to 1 by seed."""
    settled: bool = True

    @property
    def interval(self) -> Interval | None:
        """The mean and its 95% interval over seeds; None if there are no scores."""
        return mean_interval(list(self.by_seed.values())) if self.by_seed else None


@dataclass(frozen=True)
class ScoreTable:
    """Scores by model and column."""

    columns: tuple[Column, ...]
    """For each group, its mean and then its test sets."""
    cells: dict[tuple[str, Column], SeedScores]
    seeds: int
    """The number of different seeds in the table. A mean over fewer of them is not final."""

    @property
    def groups(self) -> list[Column]:
        """The columns with the groups' means."""
        return [column for column in self.columns if not column.task]

    def cell(self, model: str, column: Column) -> SeedScores:
        """Return a model's scores in a column, which may be empty."""
        return self.cells.get((model, column), SeedScores())

    def is_complete(self, model: str, column: Column) -> bool:
        """Return whether the model has a score for every seed, at learning rates that can't change any more."""
        cell = self.cell(model, column)
        return cell.settled and len(cell.by_seed) == self.seeds

    def has_scores(self, model: str) -> bool:
        """Return whether the model has a mean of some group."""
        return any(self.cell(model, column).by_seed for column in self.groups)


@dataclass(frozen=True)
class ModelDifference:
    """The difference between two models in a group's mean."""

    column: Column
    first: str
    second: str
    difference: Difference
    """`first` minus `second`, paired by seed."""
    corrected_p: float | None
    """The p-value after Holm's correction over all differences that were asked for together."""


def rows_of_sweep(sweep: SweepScores) -> list[ScoreRow]:
    """Return the test scores of a sweep at the chosen rates."""
    return [
        ScoreRow(
            model, FAMILIES.get(row.family, row.family), row.counts_as, row.name, seed, value, score.settled, row.task
        )
        for (model, row), score in sweep.scores.items()
        if row.task is not None
        for seed, value in score.by_seed.items()
    ]


def score_table(rows: Iterable[ScoreRow]) -> ScoreTable:
    """Return the means of the rows' scores.

    A group's score with a seed is the mean over the group's tasks. It exists if the model has a score with this seed on
    every test set that any model of the table has, so that means of different models are over the same tasks. A test set
    of several training tasks is a task of its own for each.
    """
    rows = list(rows)
    training_tasks: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        training_tasks.setdefault((row.group, row.test_set), set()).add(row.trained_on)
    by_column: dict[Column, dict[str, list[ScoreRow]]] = {}
    for row in rows:
        origin = f" (from {row.trained_on})" if len(training_tasks[row.group, row.test_set]) > 1 else ""
        column = Column(row.group, row.task + origin, row.test_set + origin)
        by_column.setdefault(column, {}).setdefault(row.model, []).append(row)
    order = {group: index for index, group in enumerate(FAMILIES.values())}
    groups = sorted({row.group for row in rows}, key=lambda group: (order.get(group, len(order)), group))
    columns: list[Column] = []
    cells: dict[tuple[str, Column], SeedScores] = {}
    for group in groups:
        members = [column for column in by_column if column.group == group]
        columns += [Column(group), *members]
        for column in members:
            for model, model_rows in by_column[column].items():
                by_seed = {row.seed: row.score for row in sorted(model_rows, key=lambda row: row.seed)}
                cells[model, column] = SeedScores(by_seed, all(row.settled for row in model_rows))
        for model in dict.fromkeys(row.model for row in rows if row.group == group):
            scores = [cells.get((model, column)) for column in members]
            if (mean := _group_mean(members, scores)) is not None:
                cells[model, Column(group)] = mean
    return ScoreTable(tuple(columns), cells, len({row.seed for row in rows}))


def differences(table: ScoreTable, pairs: Sequence[tuple[str, str]]) -> list[ModelDifference]:
    """Return the differences between the pairs' models in every group for which both have scores with the same seed.

    The p-values are corrected by Holm's method over all of them.
    """
    compared: list[tuple[Column, str, str, Difference]] = []
    for column in table.groups:
        for first, second in pairs:
            difference = paired_difference(table.cell(first, column).by_seed, table.cell(second, column).by_seed)
            if difference is not None:
                compared.append((column, first, second, difference))
    corrected = holm([difference.p for *_, difference in compared])
    return [ModelDifference(*cell, p) for cell, p in zip(compared, corrected, strict=True)]


def _group_mean(members: Sequence[Column], scores: Sequence[SeedScores | None]) -> SeedScores | None:
    """Return a model's mean over a group's tasks; None if no seed has a score on every test set."""
    complete = [score for score in scores if score is not None]
    if len(complete) < len(members):
        return None
    tasks: dict[str, list[Mapping[int, float]]] = {}
    for column, score in zip(members, complete, strict=True):
        tasks.setdefault(column.task, []).append(score.by_seed)
    by_seed = {
        seed: fmean(fmean(scores[seed] for scores in sets) for sets in tasks.values())
        for seed in complete[0].by_seed
        if all(seed in score.by_seed for score in complete)
    }
    return SeedScores(by_seed, all(score.settled for score in complete)) if by_seed else None
