"""Which rate a model gets, and what halving leaves out: by validation alone, whatever the order of records."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from biphasic.sweep.records import Cell, Grid, Record
from biphasic.sweep.selection import audited, choices, pruned, replay, scores_by_seed, wanted
from sweeps import MNLI, MSMARCO, RATES, SST2, grid_of, records_of


def by_rate(cell: Cell, name: str) -> tuple[float, float]:
    """2e-5 is best on validation, 1e-4 on test; a seed adds a little."""
    return {1e-5: 0.6, 2e-5: 0.8, 5e-5: 0.7, 1e-4: 0.5}[cell.lr] + cell.seed / 100, cell.lr * 1e3 + cell.seed / 100


def chosen(grid: Grid, records: dict[str, Record], name: str = "sst2", model: str = "a", task: str = "sst2"):
    return choices(grid, records)[model, task, name]


def test_the_best_mean_on_validation() -> None:
    grid = grid_of()
    records = records_of(grid, by_rate)
    found = chosen(grid, records)
    assert (found.lr, found.complete) == (2e-5, True)
    assert found.validation == pytest.approx(0.81)
    assert scores_by_seed(records, found) == {seed: pytest.approx(0.02 + seed / 100) for seed in (0, 1, 2)}


def test_test_scores_choose_nothing() -> None:
    grid = grid_of(tasks=(SST2, MNLI), halving={"keep": 0.5, "audit": 0.0})
    records = records_of(grid, by_rate)
    noise = random.Random(1)
    others = {
        trial: replace(record, results=tuple(replace(one, test=noise.random()) for one in record.results))
        for trial, record in records.items()
    }
    assert choices(grid, records) == choices(grid, others)
    some = {trial: record for trial, record in records.items() if record.cell.seed == 0}
    assert pruned(grid, some) == pruned(grid, {trial: others[trial] for trial in some})


def test_ties_go_to_the_smaller_rate() -> None:
    grid = grid_of(rates=(5e-5, 1e-5, 2e-5))
    assert chosen(grid, records_of(grid, lambda cell, _: (0.5, 0.5))).lr == 1e-5


def test_each_test_set_has_its_own_rate() -> None:
    grid = grid_of(tasks=(MSMARCO,))
    records = records_of(grid, lambda cell, name: (cell.lr if name == "nq" else -cell.lr, 0.5))
    assert chosen(grid, records, "nq", task="msmarco").lr == 1e-4
    assert chosen(grid, records, "msmarco", task="msmarco").lr == 1e-5


def test_a_rate_without_a_seed_does_not_win_by_luck() -> None:
    grid = grid_of()
    records = records_of(grid, by_rate)
    # The best rate, without its worst seed, would look even better.
    del records["a.sst2.2e-05.0"]
    found = chosen(grid, records)
    assert (found.lr, found.complete) == (5e-5, False)
    # With that trial failed the other rate has more seeds; but the failed one had the better mean over those it has.
    failed = records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (2e-5, 0) else by_rate(cell, name))
    assert (chosen(grid, failed).lr, chosen(grid, failed).complete) == (5e-5, False)
    # A failed rate that is worse where it has scores changes nothing.
    worse = records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (1e-4, 0) else by_rate(cell, name))
    assert (chosen(grid, worse).lr, chosen(grid, worse).complete) == (2e-5, True)


def test_a_seed_that_no_rate_has_leaves_the_choice_open() -> None:
    grid = grid_of()
    records = records_of(grid, lambda cell, name: None if cell.seed == 2 else by_rate(cell, name))
    assert (chosen(grid, records).lr, chosen(grid, records).complete) == (2e-5, False)


def test_nothing_to_choose_from() -> None:
    grid = grid_of()
    for records in ({}, records_of(grid, lambda *_: None), records_of(grid, lambda *_: (None, 0.5))):
        found = chosen(grid, records)
        assert (found.lr, found.validation, found.trials, found.complete) == (None, None, {}, False)
    nan = records_of(grid, lambda cell, _: (math.nan if cell.lr == 2e-5 else 0.5, 0.5))
    assert chosen(grid, nan).lr == 1e-5


def test_without_halving_all_are_wanted() -> None:
    grid = grid_of()
    records = records_of(grid, by_rate)
    some = {trial: records[trial] for trial in list(records)[::3]}
    assert wanted(grid, some) == [trial for trial in grid.trials if trial not in some]
    assert pruned(grid, some) == []
    assert audited(grid) == []


def halve(grid: Grid, order: random.Random) -> dict[str, Record]:
    """Run what is wanted, a few at a time, in any order."""
    whole, records = records_of(grid, by_rate), dict[str, Record]()
    while names := wanted(grid, records):
        for trial in order.sample(names, order.randint(1, len(names))):
            records[trial] = whole[trial]
    return records


def test_halving_keeps_the_better_half_seed_by_seed() -> None:
    grid = grid_of(halving={"keep": 0.5, "audit": 0.0}, seeds=(0, 1, 2, 3, 4))
    for seed in range(3):
        records = halve(grid, random.Random(seed))
        run = {(cell.lr, cell.seed) for cell in (records[trial].cell for trial in records) if cell.model == "a"}
        assert run == {*((lr, 0) for lr in RATES), (2e-5, 1), (5e-5, 1), *((2e-5, s) for s in (2, 3, 4))}
        assert len(pruned(grid, records)) == len(grid.trials) - len(records)
        found = chosen(grid, records)
        assert (found.lr, found.complete) == (2e-5, True)


def test_a_rung_is_decided_when_it_is_whole() -> None:
    grid = grid_of(models=("a",), halving={"keep": 0.5, "audit": 0.0})
    records = records_of(grid, by_rate)
    first = {trial: record for trial, record in records.items() if record.cell.seed == 0}
    last = first.popitem()[0]
    assert wanted(grid, first) == [last]
    assert pruned(grid, first) == []
    first[last] = records[last]
    assert wanted(grid, first) == ["a.sst2.2e-05.1", "a.sst2.5e-05.1"]


def test_a_failed_rate_ranks_last() -> None:
    grid = grid_of(models=("a",), halving={"keep": 0.5, "audit": 0.0})
    records = records_of(grid, lambda cell, name: None if cell.lr == 2e-5 else by_rate(cell, name))
    first = {trial: record for trial, record in records.items() if record.cell.seed == 0}
    assert wanted(grid, first) == ["a.sst2.1e-05.1", "a.sst2.5e-05.1"]


def test_a_rate_that_fails_later_ranks_last_too() -> None:
    """However good it was with the seeds before."""
    grid = grid_of(models=("a",), halving={"keep": 0.5, "audit": 0.0}, seeds=(0, 1, 2, 3))
    records = records_of(grid, lambda cell, name: None if (cell.lr, cell.seed) == (2e-5, 1) else by_rate(cell, name))
    two = {trial: one for trial, one in records.items() if one.cell.seed < 1 or (one.cell.lr, one.cell.seed) in
           {(2e-5, 1), (5e-5, 1)}}  # fmt: skip
    assert wanted(grid, two) == ["a.sst2.5e-05.2", "a.sst2.5e-05.3"]


def test_audited_groups_run_whole() -> None:
    names = [f"m{number}" for number in range(200)]
    grid = grid_of(models=names, halving={"keep": 0.5, "audit": 0.1})
    found = audited(grid)
    assert 8 <= len(found) <= 35
    assert found == audited(grid)
    assert set(audited(grid_of(models=names[:100], halving={"keep": 0.5, "audit": 0.1}))) == {
        group for group in found if group[0] in names[:100]
    }
    small = grid_of(halving={"keep": 0.5, "audit": 0.01})
    [(model, _)] = audited(small)
    out = {small.trials[trial].model for trial in pruned(small, halve(small, random.Random(0)))}
    assert out == {"a", "b"} - {model}


def test_replay_says_what_halving_would_have_done() -> None:
    grid = grid_of(models=("a", "b"))

    def late(cell: Cell, name: str) -> tuple[float, float]:
        """For model b the rate that is best over all seeds is worst with the first."""
        validation, test = by_rate(cell, name)
        if cell.model == "b" and cell.lr == 1e-4:
            return (0.1 if cell.seed == 0 else 3.0), 0.9
        return validation, test

    found = replay(grid, records_of(grid, late), 0.5)
    assert (found.groups, found.trials, found.saved_trials) == (2, 24, 2 * (12 - 4 - 2 - 1))
    assert (found.seconds, found.saved_seconds) == (240, 10 * found.saved_trials)
    by_model = {one.model: one for one in found.results}
    assert (by_model["a"].full_lr, by_model["a"].halved_lr, by_model["a"].lost) == (2e-5, 2e-5, 0)
    assert (by_model["b"].full_lr, by_model["b"].halved_lr) == (1e-4, 2e-5)
    assert by_model["b"].lost == pytest.approx(0.9 - 0.03)
    # Groups with a hole say nothing.
    hole = {trial: record for trial, record in records_of(grid, late).items() if trial != "b.sst2.0.0001.1"}
    assert replay(grid, hole, 0.5).groups == 1
