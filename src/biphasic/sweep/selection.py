"""Choose each model's learning rate for each test set from a sweep's records.

The chosen rate has the highest mean validation score over the grid's first `rate_seeds` seeds, and is the smallest of
those with equal means. A grid's only rate is chosen without validation scores too. Test scores are not used. The other
seeds run at the chosen rates only. Only rates with the largest number of scored seeds are compared, so that no rate wins
because its worst seed is missing. A choice is `complete` if no missing trial could change it: there is one rate, or every
trial with the choosing seeds has a record, the chosen rate has a score for each of these seeds, and no rate with failed
trials has a better mean over its scored seeds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from biphasic.sweep.records import Cell, Grid, TrialRecord

Trials = dict[tuple[float, int], str]
"""Trial names of one model and task, by learning rate and seed."""


@dataclass(frozen=True)
class ChosenRate:
    """The chosen learning rate of a model for a test set."""

    lr: float | None
    """The rate; None if no trial has a validation score, or with one rate a test score."""
    validation: float | None
    """Mean validation score (0 to 1) at this rate over the choosing seeds that have a score; None if none has."""
    complete: bool
    """Whether no missing trial could change the choice."""


def score_of(record: TrialRecord | None, name: str, split: Literal["validation", "test"]) -> float | None:
    """Return a trial's score on a test set, from 0 to 1; None if it is missing, NaN or Inf."""
    for result in record.results if record is not None and record.status == "done" else ():
        if result.name == name:
            value = result.validation if split == "validation" else result.test
            return value if value is not None and math.isfinite(value) else None
    return None


def trials_by_group(grid: Grid) -> dict[tuple[str, str], Trials]:
    """Return the trials of each (model, task), in the grid's order."""
    groups = {(model, task.name): Trials() for model in grid.models for task in grid.tasks}
    for trial, cell in grid.trials.items():
        groups[cell.model, cell.task][cell.lr, cell.seed] = trial
    return groups


def choose_rates(grid: Grid, records: Mapping[str, TrialRecord]) -> dict[tuple[str, str, str], ChosenRate]:
    """Return the chosen rate of each (model, task, test set), in the grid's order."""
    groups = trials_by_group(grid)
    return {
        (model, task.name, name): _choose(grid, records, groups[model, task.name], name)
        for model in grid.models
        for task in grid.tasks
        for _, name, _ in task.results
    }


def planned_trials(grid: Grid, records: Mapping[str, TrialRecord]) -> dict[str, Cell]:
    """Return the trials that the sweep runs, done or not, in the grid's order.

    Until a rate is chosen, the other seeds' trials at the first rate stand in for those at the chosen rate.
    """
    first = set(grid.learning_rates[:1])
    return _with_other_seeds_at(grid, dict.fromkeys(trials_by_group(grid), first) | _settled_rates(grid, records))


def startable_trials(grid: Grid, records: Mapping[str, TrialRecord]) -> dict[str, Cell]:
    """Return the planned trials, except those whose rate is not chosen yet."""
    return _with_other_seeds_at(grid, _settled_rates(grid, records))


def _settled_rates(grid: Grid, records: Mapping[str, TrialRecord]) -> dict[tuple[str, str], set[float]]:
    """Return the chosen rates by (model, task) where all choosing trials have a record. Empty if all seeds choose."""
    if grid.rate_seeds == len(grid.seeds):
        return {}
    choosing = grid.seeds[: grid.rate_seeds]
    missing = [cell for trial, cell in grid.trials.items() if cell.seed in choosing and trial not in records]
    open_pairs = {(cell.model, cell.task) for cell in missing}
    rates: dict[tuple[str, str], set[float]] = {}
    for (model, task, _), chosen in choose_rates(grid, records).items():
        if (model, task) not in open_pairs:
            rates.setdefault((model, task), set()).update([chosen.lr] if chosen.lr is not None else [])
    return rates


def _with_other_seeds_at(grid: Grid, rates: Mapping[tuple[str, str], set[float]]) -> dict[str, Cell]:
    """Return all trials with choosing seeds, and the trials of the other seeds at the given rates."""
    choosing = set(grid.seeds[: grid.rate_seeds])
    return {
        trial: cell
        for trial, cell in grid.trials.items()
        if cell.seed in choosing or cell.lr in rates.get((cell.model, cell.task), ())
    }


def _choose(grid: Grid, records: Mapping[str, TrialRecord], trials: Trials, name: str) -> ChosenRate:
    choosing, rates = grid.seeds[: grid.rate_seeds], grid.learning_rates

    def scores_at(lr: float, split: Literal["validation", "test"]) -> dict[int, float]:
        found = {seed: score_of(records.get(trials[lr, seed]), name, split) for seed in choosing}
        return {seed: value for seed, value in found.items() if value is not None}

    scores = {lr: of_rate for lr in rates if (of_rate := scores_at(lr, "validation"))}
    if not scores:
        # With one rate there is nothing to choose, so a task without validation is no problem.
        tested = scores_at(rates[0], "test") if len(rates) == 1 else {}
        return ChosenRate(rates[0] if tested else None, None, len(rates) == 1)
    most = max(map(len, scores.values()))
    mean = {lr: fmean(by_seed.values()) for lr, by_seed in scores.items()}
    best = min((lr for lr in scores if len(scores[lr]) == most), key=lambda lr: (-mean[lr], lr))
    complete = most == len(choosing) and all(trials[lr, seed] in records for lr in rates for seed in choosing)
    complete |= len(rates) == 1
    for other in scores:
        # A rate with failed trials could have won if its mean over the remaining seeds is better.
        if any(trials[other, seed] in records and seed not in scores[other] for seed in choosing):
            common = scores[other].keys() & scores[best].keys()
            totals = {lr: math.fsum(scores[lr][seed] for seed in common) for lr in (other, best)}
            complete &= totals[other] <= totals[best]
    return ChosenRate(best, mean[best], complete)
