"""Which learning rate a model gets on a test set, and which trials successive halving leaves out.

Everything here is a function of the grid and of the records, whatever the order in which those came: machines that share a
sweep decide alike. Nothing here looks at a test score, save `scores_by_seed` and what `replay` says about lost ones.

**The choice of a rate.** For a model and a test set, a rate's score is its mean validation score over seeds. Only the
rates with the most scored seeds compete, so a rate that lacks a seed never wins over one that has it; of equal means the
smaller rate wins. A choice is `complete` when nothing that is absent could have changed it: every trial has a record or
was pruned, the chosen rate has a score for every seed, and no rate that was left out because of failed trials has a
better mean over the seeds that it has.

**Halving.** Seeds are the resource. Of a model and a task, all rates are run with the first seed; the best share `keep` of
them (rounded up) go on to the second seed, of these the best share, by the mean over both seeds, to the third, and so on
until one is left, which gets all remaining seeds. Each time it is decided when all trials of that seed have a record, never
before. A rate with a failed trial ranks last. A share `audit` of the groups (a model and a task each) is run whole, to see
whether halving chooses as the whole grid does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from biphasic.sweep.records import Grid, GridTask, Record

KEEP = 0.5
AUDIT = 0.1

_Trials = dict[tuple[float, int], str]
"""A group's trials by learning rate and seed."""


@dataclass(frozen=True)
class Choice:
    """The learning rate of a model on a test set."""

    model: str
    task: str
    """Of the grid: what was trained on."""
    name: str
    """The test set."""
    lr: float | None
    """None when no trial has a validation score."""
    validation: float | None
    """Its mean validation score over the seeds that have one, a share of 1."""
    trials: dict[int, str]
    """At that rate, by seed."""
    complete: bool
    """Whether nothing that is absent could have changed it."""


@dataclass(frozen=True)
class Replayed:
    """What halving would have done in a group whose whole grid is recorded, as to one test set of the task."""

    model: str
    task: str
    name: str
    full_lr: float
    """Chosen from all trials."""
    halved_lr: float
    """Chosen from those that halving would have run."""
    lost: float | None
    """Test score of the first rate less that of the second, over common seeds, a share of 1; None without such seeds."""


@dataclass(frozen=True)
class Replay:
    """What halving would have saved and lost in the groups whose whole grid is recorded."""

    groups: int
    trials: int
    """Of those groups, all that were run."""
    saved_trials: int
    seconds: float
    """Of all those trials, as recorded (`total`)."""
    saved_seconds: float
    results: tuple[Replayed, ...]


def score(record: Record | None, name: str, split: Literal["validation", "test"]) -> float | None:
    """A done trial's score on the test set `name`, a share of 1; None when it has none, or one that is no number."""
    if record is None or record.status != "done":
        return None
    for result in record.results:
        if result.name == name:
            found = result.validation if split == "validation" else result.test
            return found if found is not None and math.isfinite(found) else None
    return None


def trials_by_group(grid: Grid) -> dict[tuple[str, str], dict[tuple[float, int], str]]:
    """Trials by (learning rate, seed), of each (model, task) of the grid, in its order."""
    found: dict[tuple[str, str], _Trials] = {
        (model.name, task.name): {} for model in grid.models for task in grid.tasks
    }
    for trial, cell in grid.trials.items():
        found[cell.model, cell.task][cell.lr, cell.seed] = trial
    return found


def choices(grid: Grid, records: Mapping[str, Record]) -> dict[tuple[str, str, str], Choice]:
    """The choice of each model, task and test set, in the grid's order; keys are (model, task, test set's name)."""
    groups, left_out = trials_by_group(grid), set(pruned(grid, records))
    return {
        (model.name, task.name, name): _choose(
            grid, records, groups[model.name, task.name], left_out, (model.name, task.name, name)
        )
        for model in grid.models
        for task in grid.tasks
        for _, name, _ in task.results
    }


def scores_by_seed(records: Mapping[str, Record], choice: Choice) -> dict[int, float]:
    """Test scores by seed at the chosen rate, in the grid's order of seeds; those seeds that have one."""
    found = {seed: score(records.get(trial), choice.name, "test") for seed, trial in choice.trials.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def wanted(grid: Grid, records: Mapping[str, Record]) -> list[str]:
    """The trials that have no record and may begin now, in the grid's order; without halving, all that have none."""
    begun = _decided(grid, records)[0]
    return [trial for trial in grid.trials if trial in begun and trial not in records]


def pruned(grid: Grid, records: Mapping[str, Record]) -> list[str]:
    """The trials that have no record and never get one, by the records there are; in the grid's order."""
    out = _decided(grid, records)[1]
    return [trial for trial in grid.trials if trial in out and trial not in records]


def audited(grid: Grid) -> list[tuple[str, str]]:
    """The groups (model, task) that are run whole although the sweep halves, in the grid's order.

    A group is one when the hash of its names falls in the share `audit`, so that it stays one in a larger grid; when none
    does and the share isn't 0, it is the one with the smallest hash.
    """
    if grid.halving is None:
        return []
    share = float(grid.halving.get("audit", AUDIT))
    groups = list(trials_by_group(grid))
    found = [group for group in groups if _hash(group) < share]
    return found if found or not groups or share <= 0 else [min(groups, key=_hash)]


def keep_share(grid: Grid) -> float:
    """The share of rates that goes on to the next seed; where the grid doesn't halve, what it would be by default."""
    return float((grid.halving or {}).get("keep", KEEP))


def replay(grid: Grid, records: Mapping[str, Record], keep: float) -> Replay:
    """What halving would have saved, chosen and lost in the groups whose every trial has a record.

    Args:
        grid: the sweep's.
        records: by trial.
        keep: the share of rates that goes on to the next seed.
    """
    groups = trials = saved = 0
    seconds: list[float] = []
    saved_seconds: list[float] = []
    results: list[Replayed] = []
    tasks = {task.name: task for task in grid.tasks}
    for (model, task), mine in trials_by_group(grid).items():
        if not mine or any(trial not in records for trial in mine.values()):
            continue
        out = _halve(grid, records, mine, tasks[task], keep)[1]
        kept = {trial: records[trial] for trial in mine.values() if trial not in out}
        groups, trials, saved = groups + 1, trials + len(mine), saved + len(out)
        took = {trial: records[trial].seconds.get("total", 0.0) for trial in mine.values()}
        seconds += took.values()
        saved_seconds += [spent for trial, spent in took.items() if trial in out]
        for _, name, _ in tasks[task].results:
            full = _choose(grid, records, mine, set(), (model, task, name))
            halved = _choose(grid, kept, mine, out, (model, task, name))
            if full.lr is not None and halved.lr is not None:
                best, reached = scores_by_seed(records, full), scores_by_seed(records, halved)
                lost = _mean(best[seed] - reached[seed] for seed in best if seed in reached)
                results.append(Replayed(model, task, name, full.lr, halved.lr, lost))
    return Replay(groups, trials, saved, math.fsum(seconds), math.fsum(saved_seconds), tuple(results))


def _choose(
    grid: Grid, records: Mapping[str, Record], trials: _Trials, left_out: set[str], of: tuple[str, str, str]
) -> Choice:
    """Of one model, task and test set; `trials` are the group's."""
    model, task, name = of
    scores: dict[float, dict[int, float]] = {}
    failed: set[float] = set()
    complete = True
    for lr in grid.learning_rates:
        for seed in grid.seeds:
            trial = trials.get((lr, seed))
            value = score(records.get(trial or ""), name, "validation")
            if value is not None:
                scores.setdefault(lr, {})[seed] = value
            elif trial in records:
                failed.add(lr)
            elif trial is not None and trial not in left_out:
                complete = False
    if not scores:
        return Choice(model, task, name, None, None, {}, False)
    most = max(len(by_seed) for by_seed in scores.values())
    mean = {lr: math.fsum(by_seed.values()) / len(by_seed) for lr, by_seed in scores.items()}
    lr = min((lr for lr in scores if len(scores[lr]) == most), key=lambda lr: (-mean[lr], lr))
    complete &= most == len(grid.seeds)
    for other in failed & set(scores):
        # Might it have won, had it not failed?
        common = [seed for seed in scores[other] if seed in scores[lr]]
        complete &= math.fsum(scores[other][seed] for seed in common) <= math.fsum(scores[lr][seed] for seed in common)
    chosen = {seed: trials[lr, seed] for seed in grid.seeds if (lr, seed) in trials}
    return Choice(model, task, name, lr, mean[lr], chosen, complete)


def _decided(grid: Grid, records: Mapping[str, Record]) -> tuple[set[str], set[str]]:
    """The trials that may be run by now, and those that never are."""
    if grid.halving is None:
        return set(grid.trials), set()
    begun: set[str] = set()
    out: set[str] = set()
    whole, tasks, keep = set(audited(grid)), {task.name: task for task in grid.tasks}, keep_share(grid)
    for group, trials in trials_by_group(grid).items():
        if group in whole:
            begun.update(trials.values())
        else:
            more, less = _halve(grid, records, trials, tasks[group[1]], keep)
            begun |= more
            out |= less
    return begun, out


def _halve(
    grid: Grid, records: Mapping[str, Record], trials: _Trials, task: GridTask, keep: float
) -> tuple[set[str], set[str]]:
    """Of one group, the same."""
    begun: set[str] = set()
    out: set[str] = set()
    rates = list(grid.learning_rates)
    for at, seed in enumerate(grid.seeds):
        rung = [trials[lr, seed] for lr in rates if (lr, seed) in trials]
        begun.update(rung)
        # Less a little, or 0.7 of 10 is 7.000000000000001, so 8.
        count = max(1, math.ceil(keep * len(rates) - 1e-9))
        if count >= len(rates):
            continue  # nothing to decide, so nothing to wait for
        if any(trial not in records for trial in rung):
            break
        best = _ranked(records, trials, task, rates, grid.seeds[: at + 1])[:count]
        later = [(lr, s) for lr in rates if lr not in best for s in grid.seeds[at + 1 :]]
        out.update(trials[cell] for cell in later if cell in trials)
        rates = [lr for lr in rates if lr in best]
    return begun, out


def _ranked(
    records: Mapping[str, Record], trials: _Trials, task: GridTask, rates: list[float], seeds: tuple[int, ...]
) -> list[float]:
    """Rates from the best to the worst: fewest failed trials, then the mean validation score, then the smaller rate."""
    run = {lr: [records[trials[lr, seed]] for seed in seeds if (lr, seed) in trials] for lr in rates}
    # A test set without validation data has no score in any trial; what only some trials lack is a fault of theirs.
    names = [
        name
        for _, name, _ in task.results
        if any(score(record, name, "validation") is not None for found in run.values() for record in found)
    ]

    def rank(lr: float) -> tuple[int, float, float]:
        means = []
        for record in run[lr]:
            reached = [value for name in names if (value := score(record, name, "validation")) is not None]
            if reached and len(reached) == len(names):
                means.append(math.fsum(reached) / len(reached))
        mean = _mean(means)
        return len(run[lr]) - len(means), -mean if mean is not None else math.inf, lr

    return sorted(rates, key=rank)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def _hash(group: tuple[str, str]) -> float:
    """In [0, 1), and the same everywhere."""
    return int.from_bytes(hashlib.sha256("\0".join(group).encode()).digest()[:8], "big") / 2**64
