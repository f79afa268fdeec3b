"""Chosen rates depend on validation scores only, whatever the order of records."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from biphasic.sweep.records import Cell, Grid, TrialRecord
from biphasic.sweep.selection import choose_rates, scores_by_seed
from sweeps import MNLI, MSMARCO, SST2, grid_of, records_of


def by_rate(cell: Cell, name: str) -> tuple[float, float]:
    """2e-5 is best on validation, 1e-4 on test; a seed adds a little."""
    return {1e-5: 0.6, 2e-5: 0.8, 5e-5: 0.7, 1e-4: 0.5}[cell.lr] + cell.seed / 100, cell.lr * 1e3 + cell.seed / 100


def chosen_rate(grid: Grid, records: dict[str, TrialRecord], name: str = "sst2", model: str = "a", task: str = "sst2"):
    return choose_rates(grid, records)[model, task, name]


def test_the_best_mean_on_validation() -> None:
    grid = grid_of()
    records = records_of(grid, by_rate)
    chosen = chosen_rate(grid, records)
    assert (chosen.lr, chosen.complete) == (2e-5, True)
    assert chosen.validation == pytest.approx(0.81)
    assert scores_by_seed(records, chosen) == {seed: pytest.approx(0.02 + seed / 100) for seed in (0, 1, 2)}


def test_test_scores_choose_nothing() -> None:
    grid = grid_of(tasks=(SST2, MNLI))
    records = records_of(grid, by_rate)
    noise = random.Random(1)
    others = {
        trial: replace(record, results=tuple(replace(one, test=noise.random()) for one in record.results))
        for trial, record in records.items()
    }
    assert choose_rates(grid, records) == choose_rates(grid, others)


def test_ties_go_to_the_smaller_rate() -> None:
    grid = grid_of(rates=(5e-5, 1e-5, 2e-5))
    assert chosen_rate(grid, records_of(grid, lambda cell, _: (0.5, 0.5))).lr == 1e-5


def test_each_test_set_has_its_own_rate() -> None:
    grid = grid_of(tasks=(MSMARCO,))
    records = records_of(grid, lambda cell, name: (cell.lr if name == "nq" else -cell.lr, 0.5))
    assert chosen_rate(grid, records, "nq", task="msmarco").lr == 1e-4
    assert chosen_rate(grid, records, "msmarco", task="msmarco").lr == 1e-5


def test_a_rate_without_a_seed_does_not_win_by_luck() -> None:
    grid = grid_of()
    records = records_of(grid, by_rate)
    # The best rate, without its worst seed, would look even better.
    del records["a.sst2.2e-05.0"]
    chosen = chosen_rate(grid, records)
    assert (chosen.lr, chosen.complete) == (5e-5, False)
    # With that trial failed the other rate has more seeds; but the failed one had the better mean over those it has.
    failed = records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (2e-5, 0) else by_rate(cell, name))
    assert (chosen_rate(grid, failed).lr, chosen_rate(grid, failed).complete) == (5e-5, False)
    # A failed rate that is worse where it has scores changes nothing.
    worse = records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (1e-4, 0) else by_rate(cell, name))
    assert (chosen_rate(grid, worse).lr, chosen_rate(grid, worse).complete) == (2e-5, True)


def test_a_seed_that_no_rate_has_leaves_the_choice_open() -> None:
    grid = grid_of()
    records = records_of(grid, lambda cell, name: None if cell.seed == 2 else by_rate(cell, name))
    assert (chosen_rate(grid, records).lr, chosen_rate(grid, records).complete) == (2e-5, False)


def test_nothing_to_choose_from() -> None:
    grid = grid_of()
    for records in ({}, records_of(grid, lambda *_: None), records_of(grid, lambda *_: (None, 0.5))):
        chosen = chosen_rate(grid, records)
        assert (chosen.lr, chosen.validation, chosen.trials, chosen.complete) == (None, None, {}, False)
    nan = records_of(grid, lambda cell, _: (math.nan if cell.lr == 2e-5 else 0.5, 0.5))
    assert chosen_rate(grid, nan).lr == 1e-5
