"""What a sweep's records say about each model: its test scores at the chosen rates, by test set and by family."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from biphasic.report.statistics import Mean, deviation, mean_interval
from biphasic.sweep.records import Grid, Record
from biphasic.sweep.selection import Choice, choices, pruned, score, scores_by_seed, trials_by_group

FAMILIES = {"classification": "SC", "tokens": "TC", "question_answering": "QA", "retrieval": "IR"}
"""Families in the paper's order, and their titles there; one that isn't here comes last, by its own name."""
NEAR = 0.01
"""How far below the best a rate may be to count as near it: a point."""


@dataclass(frozen=True)
class Row:
    """A line of the main table: a test set, or the mean of a family."""

    title: str
    family: str
    metric: str
    """Empty for a family."""
    task: str | None = None
    """What was trained on; None for a family."""
    counts_as: str = ""
    """The task as families count it: MNLI's two test sets are one."""
    name: str = ""
    """The test set's."""


@dataclass(frozen=True)
class Entry:
    """A model in a row."""

    scores: dict[int, float]
    """Test scores by seed at the chosen rate (of a family: at each task's own), shares of 1."""
    asked: int
    """Seeds of the grid."""
    settled: bool
    """Whether no trial that is absent could change a chosen rate."""

    @property
    def whole(self) -> bool:
        """Whether it rests on everything that was asked for."""
        return self.settled and len(self.scores) == self.asked

    @property
    def mean(self) -> Mean | None:
        """Over seeds; None when there are none."""
        return mean_interval(list(self.scores.values())) if self.scores else None


@dataclass(frozen=True)
class Stability:
    """How much a model's test score on one set depends on rate and seed."""

    seed_deviation: float | None
    """Standard deviation over seeds at the chosen rate, a share of 1; None for fewer than two seeds."""
    rate_range: float | None
    """Best less worst rate with the same seed, the mean over `seeds` of them; None when fewer than two rates have scores."""
    near: int | None
    """Rates whose mean over `seeds` seeds is within a point of the best's; None when `seeds` is 0."""
    rates: int
    seeds: int
    """The seeds with which every rate has a record: with others the comparison would favour the rates that lack them."""
    failed: int
    """Trials of the model and task."""
    trials: int


@dataclass(frozen=True)
class Sweep:
    """A grid, its records, and what follows from both."""

    grid: Grid
    records: dict[str, Record]
    choices: dict[tuple[str, str, str], Choice]
    """By (model, task, test set)."""
    groups: dict[tuple[str, str], dict[tuple[float, int], str]]
    """Trials by (learning rate, seed), of each (model, task)."""
    pruned: frozenset[str]
    rows: tuple[Row, ...]
    """Family after family, each test set in the grid's order, then the family's mean."""
    entries: dict[tuple[str, Row], Entry]

    def status(self, trial: str) -> str:
        """`done`, `failed`, `pruned` or `missing`."""
        if trial in self.records:
            return self.records[trial].status
        return "pruned" if trial in self.pruned else "missing"

    def counts(self, model: str | None = None) -> Counter[str]:
        """Trials by status, of one model or of all."""
        cells = self.grid.trials.items()
        return Counter(self.status(trial) for trial, cell in cells if model in (None, cell.model))


def gather(grid: Grid, records: Mapping[str, Record]) -> Sweep:
    """Choose rates and take the scores at them."""
    chosen = choices(grid, records)
    rows = _rows(grid)
    entries: dict[tuple[str, Row], Entry] = {}
    for model in (model.name for model in grid.models):
        family: list[tuple[Row, Entry]] = []
        for row in rows:
            if row.task is not None:
                choice = chosen[model, row.task, row.name]
                entry = Entry(scores_by_seed(records, choice), len(grid.seeds), choice.complete)
                family.append((row, entry))
            else:
                entry, family = _family(grid, family), []
            entries[model, row] = entry
    return Sweep(grid, dict(records), chosen, trials_by_group(grid), frozenset(pruned(grid, records)), rows, entries)


def curve(sweep: Sweep, model: str, row: Row) -> dict[float, dict[int, float]]:
    """A model's test scores on a test set, shares of 1: by learning rate and seed; rates without scores are empty."""
    trials = sweep.groups[model, row.task or ""]
    found: dict[float, dict[int, float]] = {lr: {} for lr in sweep.grid.learning_rates}
    for (lr, seed), trial in trials.items():
        value = score(sweep.records.get(trial), row.name, "test")
        if value is not None:
            found[lr][seed] = value
    return {lr: {seed: by_seed[seed] for seed in sweep.grid.seeds if seed in by_seed} for lr, by_seed in found.items()}


def stability(sweep: Sweep, model: str, row: Row) -> Stability:
    """How a model's test score on a test set spreads."""
    trials = sweep.groups[model, row.task or ""]
    rates, by_rate = sweep.grid.learning_rates, curve(sweep, model, row)
    seeds = [s for s in sweep.grid.seeds if all(trials.get((lr, s)) in sweep.records for lr in rates)]
    reached = {lr: [by_rate[lr][seed] for seed in seeds if seed in by_rate[lr]] for lr in rates}
    ranges = []
    for seed in seeds:
        scores = [by_rate[lr][seed] for lr in rates if seed in by_rate[lr]]
        if len(scores) > 1:
            ranges.append(max(scores) - min(scores))
    # A rate that failed with a seed counts, but not as one that is near.
    means = [math.fsum(scores) / len(scores) for scores in reached.values() if seeds and len(scores) == len(seeds)]
    return Stability(
        seed_deviation=deviation(list(sweep.entries[model, row].scores.values())),
        rate_range=math.fsum(ranges) / len(ranges) if ranges else None,
        near=sum(mean >= max(means) - NEAR - 1e-12 for mean in means) if seeds else None,
        rates=len(rates),
        seeds=len(seeds),
        failed=sum(sweep.status(trial) == "failed" for trial in trials.values()),
        trials=len(trials),
    )


def _rows(grid: Grid) -> tuple[Row, ...]:
    names = Counter(name for task in grid.tasks for _, name, _ in task.results)
    families = {task.family for task in grid.tasks}
    rows: list[Row] = []
    for family in [*FAMILIES, *sorted(families - set(FAMILIES))]:
        for task in grid.tasks:
            if task.family == family:
                for counts_as, name, metric in task.results:
                    title = name if names[name] == 1 else f"{name} (from {task.name})"
                    rows.append(Row(title, family, metric, task.name, counts_as, name))
        if family in families:
            rows.append(Row(FAMILIES.get(family, family), family, ""))
    return tuple(rows)


def _family(grid: Grid, members: list[tuple[Row, Entry]]) -> Entry:
    """The mean over a family's tasks, for the seeds with which every test set of every task has a score."""
    tasks: dict[tuple[str | None, str], list[dict[int, float]]] = {}
    for row, entry in members:
        tasks.setdefault((row.task, row.counts_as), []).append(entry.scores)
    scores = {}
    for seed in grid.seeds:
        if all(seed in entry.scores for _, entry in members):
            means = [math.fsum(one[seed] for one in results) / len(results) for results in tasks.values()]
            scores[seed] = math.fsum(means) / len(means)
    return Entry(scores, len(grid.seeds), all(entry.settled for _, entry in members))
