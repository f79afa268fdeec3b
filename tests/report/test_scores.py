"""Means of a study's scores by model and group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphasic.report.scores import ScoreTable, chosen_scores, differences, score_table, trial_table
from biphasic.report.statistics import holm, mean_interval
from biphasic.sweep.records import Cell, Grid, TrialRecord
from helpers.studies import score_rows
from helpers.sweeps import MNLI, MSMARCO, SST2, grid_of, records_of


def table_of(scores: dict[tuple[str, str, str, int], float]) -> ScoreTable:
    return score_table(score_rows({(model, "SC", *rest): value for (model, *rest), value in scores.items()}))


def table_of_sweep(grid: Grid, records: dict[str, TrialRecord]) -> ScoreTable:
    return score_table(chosen_scores(trial_table(grid, records)))


def by_seed(table: ScoreTable, model: str, group: str = "SC", test_set: str = "") -> dict[int, float]:
    rows = table.scores.query("model == @model and group == @group and test_set == @test_set and score == score")
    return dict(zip(rows.seed, rows.score, strict=True))


def test_a_groups_mean_counts_mnli_once() -> None:
    table = table_of({
        **{("a", "sst2", "sst2", seed): 0.9 + 0.01 * seed for seed in range(2)},
        **{("a", "mnli", "mnli-m", seed): 0.6 for seed in range(2)},
        **{("a", "mnli", "mnli-mm", seed): 0.8 for seed in range(2)},
    })  # fmt: skip
    assert table.columns == [("SC", ""), ("SC", "sst2"), ("SC", "mnli-m"), ("SC", "mnli-mm")]
    assert by_seed(table, "a") == pytest.approx({0: 0.8, 1: 0.805})
    assert table.means.complete["a", "SC", ""]


def test_a_group_without_all_test_sets_has_no_mean() -> None:
    scores = {("a", "sst2", "sst2", 0): 0.9, ("a", "sst2", "sst2", 1): 0.9, ("a", "qqp", "qqp", 1): 0.7}
    table = table_of({**scores, ("b", "sst2", "sst2", 0): 0.8})
    assert by_seed(table, "a") == {1: pytest.approx(0.8)}
    assert not table.means.complete["a", "SC", ""]
    assert by_seed(table, "b") == {}
    assert table.scored_models() == ["a"]
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
        for group, tasks in (("SC", [["sst2"], ["mnli-m", "mnli-mm"]]), ("IR", [["msmarco"], ["nq"]])):
            expected = {
                seed: np.mean(
                    [np.mean([score(Cell(model, "", 1e-4, seed), name)[1] for name in names]) for names in tasks]
                )
                for seed in (range(2) if (model, group) == ("b", "IR") else range(3))
            }
            assert by_seed(table, model, group) == pytest.approx(expected)
    found, values = table.means.loc[("a", "IR", "")], [*by_seed(table, "a", "IR").values()]
    assert (found.score, found.half_width) == pytest.approx((mean_interval(values).mean, mean_interval(values).half))


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
