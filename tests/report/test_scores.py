"""Means of scores by model and group; intervals and tests against scipy's own, and values for which they are undefined."""

import math
from dataclasses import astuple, replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from biphasic.report import scores
from biphasic.report.scores import (
    ScoreTable,
    chosen_scores,
    differences,
    score_table,
    trial_table,
)
from biphasic.report.statistics import holm, intervals, mean_interval
from biphasic.sweep.records import Cell, Grid, GridTask, TrialRecord
from helpers.studies import score_rows
from helpers.sweeps import MNLI, MSMARCO, SST2, grid_of, records_of


def table_of(scores: dict[tuple[str, str, str, int], float]) -> ScoreTable:
    return score_table(score_rows({(model, "SC", *rest): value for (model, *rest), value in scores.items()}))


def table_of_sweep(grid: Grid, records: dict[str, TrialRecord]) -> ScoreTable:
    return score_table(chosen_scores(trial_table(grid, records)))


def by_seed(table: ScoreTable, model: str, group: str = "SC", test_set: str = "") -> dict[int, float]:
    rows = table.scores.query("model == @model and group == @group and test_set == @test_set and score == score")
    return dict(zip(rows.seed, rows.score, strict=True))


def test_a_groups_mean_counts_mnlis_first_test_set() -> None:
    table = table_of({
        **{("a", "sst2", "sst2", seed): 0.9 + 0.01 * seed for seed in range(2)},
        **{("a", "mnli", "mnli-m", seed): 0.6 for seed in range(2)},
        **{("a", "mnli", "mnli-mm", seed): 0.8 for seed in range(2)},
    })  # fmt: skip
    assert table.columns == [("SC", ""), ("SC", "sst2"), ("SC", "mnli-m"), ("SC", "mnli-mm")]
    assert by_seed(table, "a") == pytest.approx({0: 0.75, 1: 0.755})
    assert table.means.complete["a", "SC", ""]


def test_a_group_without_all_test_sets_has_no_mean() -> None:
    scores = {("a", "sst2", "sst2", 0): 0.9, ("a", "sst2", "sst2", 1): 0.9, ("a", "qqp", "qqp", 1): 0.7}
    table = table_of({**scores, ("b", "sst2", "sst2", 0): 0.8})
    assert by_seed(table, "a") == {1: pytest.approx(0.8)}
    assert not table.means.complete["a", "SC", ""]
    assert by_seed(table, "b") == {}
    assert [table.means.seeds[model, "SC", ""] for model in "ab"] == [1, 0]
    assert table.text(["a", "b", "c"], [("SC", ""), ("SC", "sst2")]) == [
        ["80.00 (1 of 2)", "90.00 ± 0.00 (2)"], ["missing", "80.00 (1 of 2)"], ["missing", "missing"]
    ]  # fmt: skip


def test_a_group_with_a_rate_that_may_change_is_not_complete() -> None:
    scores = {(model, "SC", task, task, seed): 0.9 for model in "ab" for task in ("sst2", "qqp") for seed in range(2)}
    rows = score_rows(scores)
    table = score_table(rows.assign(settled=(rows.model != "a") | (rows.task != "qqp")))
    assert not table.means.complete["a", "SC", ""] and not table.means.settled["a", "SC", "qqp"]
    assert table.means.complete["a", "SC", "sst2"] and table.means.complete["b", "SC", ""]


def test_a_sweeps_means() -> None:
    grid = grid_of(tasks=(SST2, MNLI, MSMARCO))

    def score(cell, name):
        if (cell.model, cell.seed, name) == ("b", 2, "nq"):
            return (0.1, None)
        return 0.5 + cell.lr, 0.5 + 0.1 * cell.seed + 0.01 * len(name) + (0.05 if cell.model == "a" else 0)

    table = table_of_sweep(grid, records_of(grid, score))
    assert table.groups == [("SC", ""), ("IR", "")]
    for model in ("a", "b"):
        for group, names in (("SC", ["sst2", "mnli-m"]), ("IR", ["msmarco", "nq"])):
            expected = {
                seed: np.mean([score(Cell(model, "", 1e-4, seed), name)[1] for name in names])
                for seed in (range(2) if (model, group) == ("b", "IR") else range(3))
            }
            assert by_seed(table, model, group) == pytest.approx(expected)
    found, values = table.means.loc[("a", "IR", "")], [*by_seed(table, "a", "IR").values()]
    assert (found.score, found.half_width) == pytest.approx((mean_interval(values).mean, mean_interval(values).half))


def test_a_sweeps_own_group_has_one_mean() -> None:
    """GLUE's average: the first metric of every task, of both families."""
    stsb = GridTask("stsb", "regression", (("stsb", "stsb", "spearman"), ("stsb", "stsb pearson", "pearson")))
    grid = replace(grid_of(models=("a",), tasks=(SST2, MNLI, stsb)), task_group="GLUE")
    scores = {"sst2": 0.9, "mnli-m": 0.6, "mnli-mm": 0.1, "stsb": 0.3, "stsb pearson": 0.2}
    table = table_of_sweep(grid, records_of(grid, lambda cell, name: (scores[name], scores[name])))
    assert table.groups == [("GLUE", "")]
    assert by_seed(table, "a", "GLUE") == pytest.approx(dict.fromkeys(range(3), 0.6))
    families = table_of_sweep(replace(grid, task_group=None), records_of(grid, lambda cell, name: (0.5, 0.5)))
    assert families.groups == [("SC", ""), ("regression", "")]


def test_a_second_metric_never_counts_in_the_mean() -> None:
    """Nor for a seed that has it alone, as at a rate that only the second metric chose."""
    conll = GridTask("conll", "classification", (("conll", "conll", "sentence_f1"), ("conll", "conll f1", "f1")))
    grid = replace(grid_of(tasks=(SST2, conll)), task_group="all")
    records = records_of(grid, lambda cell, name: (0.5, 0.8 if name == "conll f1" else 0.9))
    rows = chosen_scores(trial_table(grid, records))
    lacks = (rows.model == "a") & (rows.test_set == "conll") & (rows.seed == 1)
    table = score_table(rows[~lacks])
    assert by_seed(table, "a", "all") == {0: pytest.approx(0.9), 2: pytest.approx(0.9)}
    assert by_seed(table, "b", "all") == pytest.approx(dict.fromkeys(range(3), 0.9))


def test_a_test_set_of_two_training_tasks_counts_for_each() -> None:
    mldr = replace(MSMARCO, name="mldr", results=(("nq", "nq", "ndcg_at_10"), ("mldr", "mldr", "ndcg_at_10")))
    grid = grid_of(tasks=(replace(MSMARCO, results=MSMARCO.results[1:]), mldr))
    records = records_of(grid, lambda cell, name: (cell.lr, {"msmarco": 0.8, "mldr": 0.2}[cell.task]))
    table = table_of_sweep(grid, records)
    assert [name for _, name in table.columns] == ["", "nq (from msmarco)", "nq (from mldr)", "mldr"]
    assert by_seed(table, "a", "IR") == pytest.approx(dict.fromkeys(range(3), 0.4))


def test_differences_are_paired_and_corrected_together() -> None:
    scores = {
        (model, "sst2", "sst2", seed): base + noise * seed + (0.001 if (model, seed) == ("c", 1) else 0)
        for model, base, noise in (("a", 0.9, 0.01), ("b", 0.8, 0.012), ("c", 0.7, 0.02))
        for seed in range(3)
    }
    table = table_of(scores)
    compared = differences(table, [("a", "b"), ("a", "c"), ("b", "missing")], table.groups)
    assert list(compared[["first", "second", "seeds"]].itertuples(index=False)) == [("a", "b", 3), ("a", "c", 3)]
    assert compared.difference[0] == pytest.approx(0.098)
    paired = stats.ttest_rel([0.9, 0.91, 0.92], [0.7, 0.721, 0.74])
    assert compared.p[1] == pytest.approx(paired.pvalue)
    assert list(compared.p_holm) == list(holm(compared.p))


def test_all_pairs_of_a_column_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls don't grow with the pairs, whose numbers are those of pair by pair; also with seeds that are missing."""
    generator = np.random.default_rng(3)
    models = [f"m{number:02}" for number in range(30)]
    table = table_of({
        (model, task, task, seed): float(generator.normal(0.8, 0.01))
        for model in models for task in ("sst2", "qqp") for seed in range(4) if generator.random() > 0.1
    })  # fmt: skip
    calls = []
    monkeypatch.setattr(scores, "intervals", lambda groups: calls.append(groups) or intervals(groups))
    compared = differences(table, list(combinations(models, 2)), table.columns)
    assert len(calls) == len(table.columns) == 3 and len(compared) == 3 * 30 * 29 / 2
    for row in compared[::50].itertuples():
        first, second = (by_seed(table, model, "SC", row.test_set) for model in (row.first, row.second))
        expected = difference(first, second)
        found = row.difference, row.half_width, row.seeds, row.p
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
        if (pairs := [(first[seed], second[seed]) for seed in first.keys() & second.keys()])[1:]:
            assert row.p == pytest.approx(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 5, 30):
        values = generator.normal(0.8, 0.02, count)
        interval = mean_interval(list(values))
        low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
        assert (interval.mean - interval.half, interval.mean + interval.half) == (
            pytest.approx(low),
            pytest.approx(high),
        )
        assert interval.count == count
    # By hand: 2.776 is t(0.975, 4).
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]).half == pytest.approx(2.776445 * 1.5811388 / 5**0.5)


def test_single_and_equal_values() -> None:
    single = mean_interval([0.5])
    assert (single.mean, single.count) == (0.5, 1) and math.isnan(single.half)
    assert mean_interval([0.1, 0.1, 0.1]).half == pytest.approx(0, abs=1e-15)
    none = mean_interval([])
    assert none.count == 0 and math.isnan(none.mean) and math.isnan(none.half)


def test_intervals_of_groups() -> None:
    table = pd.DataFrame({"model": ["a", "b", "a", "b", "a"], "score": [0.1, 0.5, 0.3, math.nan, 0.7]})
    found = intervals(table.groupby("model").score)
    expected = mean_interval([0.1, 0.3, 0.7])
    assert list(found.loc["a"]) == pytest.approx([expected.mean, expected.half, 3, expected.p])
    assert found.loc["b", "mean"] == 0.5 and math.isnan(found.loc["b", "half_width"]) and found.loc["b", "count"] == 1


def test_pairs_are_by_seed() -> None:
    generator = np.random.default_rng(1)
    first, noise = generator.normal(0.8, 0.05, 5), generator.normal(0.01, 0.004, 5)
    scores = {seed: float(value) for seed, value in enumerate(first)}
    others = {seed: float(value) for seed, value in zip((4, 3, 2, 1, 0), (first - noise)[::-1], strict=True)}
    others[9] = 0.1  # a seed that only one has
    interval = mean_interval(pd.Series(scores) - pd.Series(others))
    expected = stats.ttest_rel(first, first - noise)
    assert interval.p == pytest.approx(expected.pvalue)
    bounds = expected.confidence_interval(0.95)
    assert interval.half == pytest.approx((bounds.high - bounds.low) / 2)
    assert (interval.mean, interval.count) == (pytest.approx(noise.mean()), 5)
    # Not paired, nothing would be seen.
    assert stats.ttest_ind(first, first - noise).pvalue > 0.5 > 0.05 > expected.pvalue


def difference(first: dict[int, float], second: dict[int, float]) -> tuple[float, float, int, float]:
    return astuple(mean_interval(pd.Series(first) - pd.Series(second)))


def test_p_of_single_and_equal_differences() -> None:
    nan = pytest.approx(math.nan, nan_ok=True)
    assert difference({0: 0.5}, {1: 0.5}) == (nan, nan, 0, nan)
    assert difference({0: 0.5}, {0: 0.25}) == (0.25, nan, 1, nan)
    assert difference({0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7}) == (0, 0, 2, 1)
    assert difference({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}) == (0.25, 0, 2, nan)


def corrected(p: list[float]) -> list[float]:
    return list(holm(pd.Series(p, dtype=float)))


def test_holm() -> None:
    # Holm (1979), by hand: 4 * 0.01, 3 * 0.02 = 0.06, 2 * 0.025 = 0.05 raised to 0.06, and 0.5.
    assert corrected([0.5, 0.01, 0.025, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert corrected([0.9, math.nan, 0.6]) == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert corrected([]) == []
    generator = np.random.default_rng(2)
    for _ in range(50):
        given = generator.uniform(0, 0.3, 7)
        order = np.argsort(given)
        adjusted = np.minimum(1, np.maximum.accumulate(given[order] * np.arange(7, 0, -1)))
        expected = np.empty(7)
        expected[order] = adjusted
        assert corrected(list(given)) == pytest.approx(list(expected))
