"""Grids and records as a sweep leaves them, from a table of scores."""

from collections.abc import Callable, Sequence

from biphasic.finetuning.records import DownstreamResult
from biphasic.sweep.records import Cell, Grid, GridTask, TrialRecord

RATES, SEEDS = (1e-5, 2e-5, 5e-5, 1e-4), (0, 1, 2)
SST2 = GridTask("sst2", "classification", (("sst2", "sst2", "accuracy"),))
MNLI = GridTask("mnli", "classification", (("mnli", "mnli-m", "accuracy"), ("mnli", "mnli-mm", "accuracy")))
MSMARCO = GridTask("msmarco", "retrieval", (("msmarco", "msmarco", "ndcg_at_10"), ("nq", "nq", "ndcg_at_10")))


def grid_of(
    models: Sequence[str] = ("a", "b"), tasks: Sequence[GridTask] = (SST2,),
    rates: Sequence[float] = RATES, seeds: Sequence[int] = SEEDS,
    rate_seeds: int | None = None,
) -> Grid:  # fmt: skip
    trials = {
        f"{model}.{task.name}.{lr:g}.{seed}": Cell(model, task.name, lr, seed)
        for seed in seeds for task in tasks for model in models for lr in rates
    }  # fmt: skip
    return Grid(tuple(models), tuple(tasks), tuple(rates), tuple(seeds), trials, rate_seeds or len(seeds))


Score = Callable[[Cell, str], tuple[float | None, float | None] | None]
"""Validation and test score of a cell on a test set; None: the trial failed."""


def records_of(grid: Grid, score: Score) -> dict[str, TrialRecord]:
    tasks = {task.name: task for task in grid.tasks}
    records = {}
    for trial, cell in grid.trials.items():
        task = tasks[cell.task]
        scores = {name: score(cell, name) for _, name, _ in task.results}
        if None in scores.values():
            records[trial] = TrialRecord(trial, cell, "failed", error="ValueError: a | b\nmore", seconds={"total": 1.0})
            continue
        results = tuple(
            DownstreamResult(of, name, task.family, metric, *scores[name])  # pyright: ignore
            for of, name, metric in task.results
        )
        records[trial] = TrialRecord(trial, cell, "done", results, seconds={"total": 10.0})
    return records
