"""Collect each model's test scores at its chosen learning rates, by test set and by task family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from biphasic.report.statistics import Interval, deviation, mean_interval
from biphasic.sweep.records import Cell, Grid, TrialRecord
from biphasic.sweep.selection import (
    ChosenRate,
    Trials,
    choose_rates,
    planned_trials,
    score_of,
    scores_by_seed,
    trials_by_group,
)

FAMILIES = {"classification": "SC", "tokens": "TC", "question_answering": "QA", "retrieval": "IR"}
"""Task families in the order and with the titles of the paper. Other families follow, titled by their names."""
NEAR = 0.01
"""A rate is near the best one if its score is at most this much lower (one point)."""


@dataclass(frozen=True)
class TableRow:
    """A row of the main table: a test set, or the mean of a family."""

    title: str
    family: str
    metric: str
    """The main metric; empty for a family."""
    task: str | None = None
    """The task that models were trained on; None for a family."""
    counts_as: str = ""
    """The task as counted in a family's mean, in which MNLI's two test sets are one task."""
    name: str = ""
    """The test set."""


@dataclass(frozen=True)
class ModelScore:
    """A model's test scores in a row of the main table."""

    by_seed: dict[int, float]
    """Scores from 0 to 1 at the chosen rate; for a family, at each task's chosen rate."""
    expected: int
    """The number of the grid's seeds."""
    settled: bool
    """Whether no missing trial could change a chosen rate."""

    @property
    def complete(self) -> bool:
        """Whether the rate is settled and every seed has a score."""
        return self.settled and len(self.by_seed) == self.expected

    @property
    def interval(self) -> Interval | None:
        """The mean and its interval over seeds; None if there are no scores."""
        return mean_interval(list(self.by_seed.values())) if self.by_seed else None


@dataclass(frozen=True)
class Stability:
    """How much a model's score on one test set depends on the learning rate and the seed."""

    seed_deviation: float | None
    """Standard deviation over seeds at the chosen rate, on the scale from 0 to 1; None for fewer than two seeds."""
    rate_range: float | None
    """Best minus worst rate's score with the same seed, averaged over seeds; None if fewer than two rates have scores."""
    near: int | None
    """Number of rates whose mean is within a point of the best one's; None if `seeds` is 0."""
    rates: int
    seeds: int
    """Number of seeds with a record for every rate. Other seeds are not used: they would favour rates without a record."""
    failed: int
    """Number of failed trials of the model on the task, of those that the sweep runs."""
    trials: int


@dataclass(frozen=True)
class SweepScores:
    """A grid, its records, and the scores at the chosen rates."""

    grid: Grid
    records: dict[str, TrialRecord]
    chosen: dict[tuple[str, str, str], ChosenRate]
    """The chosen rates by (model, task, test set)."""
    planned: dict[str, Cell]
    """The trials that the sweep runs, done or not: without the rates that other seeds have not chosen."""
    groups: dict[tuple[str, str], Trials]
    """All combinations of rate and seed for each (model, task)."""
    rows: tuple[TableRow, ...]
    """The rows by family: each test set in the grid's order, then the family's mean."""
    scores: dict[tuple[str, TableRow], ModelScore]

    def status(self, trial: str) -> str:
        """Return a trial's status: `done`, `failed` or `missing`."""
        return self.records[trial].status if trial in self.records else "missing"

    @cached_property
    def without_test_set(self) -> frozenset[TableRow]:
        """The rows whose trials that are done have no test score, and their families: their tasks have no test set."""
        tests: dict[tuple[str, str], list[float | None]] = {}
        for trial, cell in self.planned.items():
            for result in self.records[trial].results if trial in self.records else ():
                tests.setdefault((cell.task, result.name), []).append(result.test)
        absent = {key for key, scores in tests.items() if all(score is None for score in scores)}
        rows = {row for row in self.rows if row.task is not None and (row.task, row.name) in absent}
        families = {row.family for row in rows}
        return frozenset(rows | {row for row in self.rows if row.task is None and row.family in families})

    def counts(self, model: str | None = None) -> Counter[str]:
        """Return the number of trials by status, for one model or for all."""
        return Counter(self.status(trial) for trial, cell in self.planned.items() if model in (None, cell.model))


def collect_scores(grid: Grid, records: Mapping[str, TrialRecord]) -> SweepScores:
    """Choose the learning rates, and collect the test scores at these rates."""
    chosen, rows = choose_rates(grid, records), _rows(grid)
    scores: dict[tuple[str, TableRow], ModelScore] = {}
    for model in (model.name for model in grid.models):
        members: list[tuple[TableRow, ModelScore]] = []
        for row in rows:
            if row.task is not None:
                choice = chosen[model, row.task, row.name]
                score = ModelScore(scores_by_seed(records, choice), len(grid.seeds), choice.complete)
                members.append((row, score))
            else:
                score, members = _family_score(grid, members), []
            scores[model, row] = score
    planned = planned_trials(grid, records)
    return SweepScores(grid, dict(records), chosen, planned, trials_by_group(grid), rows, scores)


def scores_by_rate(
    sweep: SweepScores, model: str, row: TableRow, split: Literal["validation", "test"] = "test"
) -> dict[float, dict[int, float]]:
    """Return a model's scores on a test set, from 0 to 1, by learning rate and seed; rates without scores are empty."""
    trials = sweep.groups[model, row.task or ""]
    scores: dict[float, dict[int, float]] = {lr: {} for lr in sweep.grid.learning_rates}
    for lr, by_seed in scores.items():
        for seed in sweep.grid.seeds:
            value = score_of(sweep.records.get(trials[lr, seed]), row.name, split)
            if value is not None:
                by_seed[seed] = value
    return scores


def stability(sweep: SweepScores, model: str, row: TableRow) -> Stability:
    """Return how much a model's score on a test set depends on the learning rate and the seed."""
    trials = sweep.groups[model, row.task or ""]
    planned = [trial for trial in trials.values() if trial in sweep.planned]
    rates, by_rate = sweep.grid.learning_rates, scores_by_rate(sweep, model, row)
    seeds = [s for s in sweep.grid.seeds if all(trials[lr, s] in sweep.records for lr in rates)]
    by_seed = [[by_rate[lr][seed] for lr in rates if seed in by_rate[lr]] for seed in seeds]
    ranges = [max(scores) - min(scores) for scores in by_seed if len(scores) > 1]
    # A rate with a failed trial counts in `rates`, but not in `near`.
    means = [fmean(by_rate[lr][seed] for seed in seeds) for lr in rates if seeds and by_rate[lr].keys() >= set(seeds)]
    return Stability(
        seed_deviation=deviation(list(sweep.scores[model, row].by_seed.values())),
        rate_range=fmean(ranges) if ranges else None,
        near=sum(mean >= max(means) - NEAR - 1e-12 for mean in means) if seeds else None,
        rates=len(rates),
        seeds=len(seeds),
        failed=sum(sweep.status(trial) == "failed" for trial in planned),
        trials=len(planned),
    )


def _rows(grid: Grid) -> tuple[TableRow, ...]:
    uses = Counter(name for task in grid.tasks for _, name, _ in task.results)
    rows: list[TableRow] = []
    for family in [*FAMILIES, *sorted({task.family for task in grid.tasks} - set(FAMILIES))]:
        tasks = [task for task in grid.tasks if task.family == family]
        for task in tasks:
            for counts_as, name, metric in task.results:
                title = name if uses[name] == 1 else f"{name} (from {task.name})"
                rows.append(TableRow(title, family, metric, task.name, counts_as, name))
        if tasks:
            rows.append(TableRow(FAMILIES.get(family, family), family, ""))
    return tuple(rows)


def _family_score(grid: Grid, members: list[tuple[TableRow, ModelScore]]) -> ModelScore:
    """Return the mean over a family's tasks for each seed that has a score on every test set."""
    tasks: dict[tuple[str | None, str], list[dict[int, float]]] = {}
    for row, score in members:
        tasks.setdefault((row.task, row.counts_as), []).append(score.by_seed)
    by_seed = {
        seed: fmean(fmean(results[seed] for results in sets) for sets in tasks.values())
        for seed in grid.seeds
        if all(seed in score.by_seed for _, score in members)
    }
    return ModelScore(by_seed, len(grid.seeds), all(score.settled for _, score in members))
