"""Chosen rates depend on validation scores only, whatever the order of records."""

import math
import random
from dataclasses import replace

import pytest

from biphasic.sweep.records import Cell, Grid, TrialRecord
from biphasic.sweep.selection import ChosenRate, choose_rates, planned_trials, startable_trials
from helpers.sweeps import MNLI, MSMARCO, SST2, grid_of, records_of


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
        assert (chosen.lr, chosen.validation, chosen.complete) == (None, None, False)
    nan = records_of(grid, lambda cell, _: (math.nan if cell.lr == 2e-5 else 0.5, 0.5))
    assert chosen_rate(grid, nan).lr == 1e-5


def test_the_only_rate_needs_no_validation() -> None:
    grid = grid_of(rates=(2e-5,), rate_seeds=1)
    records = records_of(grid, lambda *_: (None, 0.5))
    chosen = chosen_rate(grid, records)
    assert (chosen.lr, chosen.validation, chosen.complete) == (2e-5, None, True)
    assert planned_trials(grid, records) == grid.trials
    assert chosen_rate(grid, records_of(grid, lambda *_: None)).lr is None


def test_the_only_rate_is_never_open() -> None:
    """A seed that failed, or is missing, changes no choice; with or without validation scores."""
    grid = grid_of(rates=(2e-5,))
    for validation in (0.5, None):
        records = records_of(grid, lambda cell, _, score=validation: None if cell.seed == 2 else (score, 0.5))
        assert chosen_rate(grid, records) == ChosenRate(2e-5, validation, True)
        del records["a.sst2.2e-05.1"]
        assert chosen_rate(grid, records) == ChosenRate(2e-5, validation, True)
    assert chosen_rate(grid, {}) == ChosenRate(None, None, True)


def test_one_seed_chooses_and_the_others_run_at_its_rate() -> None:
    """The other seeds' scores choose nothing, and wait for the choice of their own model and task."""
    grid = grid_of(tasks=(MSMARCO,), rate_seeds=1)
    assert list(startable_trials(grid, {})) == [trial for trial, cell in grid.trials.items() if cell.seed == 0]
    assert len(planned_trials(grid, {})) == 2 * (4 + 2)
    # On seed 0, 1e-4 is best for nq and 1e-5 for msmarco; on others the middle ones.
    full = records_of(
        grid,
        lambda cell, name: ((cell.lr if name == "nq" else -cell.lr) if cell.seed == 0 else cell.lr == 2e-5, 0.5),
    )
    search = {trial: record for trial, record in full.items() if record.cell.seed == 0}
    only_a = {trial: record for trial, record in search.items() if record.cell.model == "a"}
    started = {(cell.model, cell.lr, cell.seed) for cell in startable_trials(grid, only_a).values() if cell.seed}
    assert started == {("a", lr, seed) for lr in (1e-5, 1e-4) for seed in (1, 2)}
    assert len(planned_trials(grid, only_a)) == (4 + 4) + (4 + 2)
    assert planned_trials(grid, search) == startable_trials(grid, search)
    for records in (search, full):
        for name, rate in (("nq", 1e-4), ("msmarco", 1e-5)):
            chosen = chosen_rate(grid, records, name, task="msmarco")
            assert (chosen.lr, chosen.complete) == (rate, True)


def test_without_a_score_no_other_seed_runs() -> None:
    grid = grid_of(rate_seeds=2)
    failed = {trial: record for trial, record in records_of(grid, lambda *_: None).items() if record.cell.seed < 2}
    assert {cell.seed for cell in startable_trials(grid, failed).values()} == {0, 1}
    assert planned_trials(grid, failed) == startable_trials(grid, failed)
