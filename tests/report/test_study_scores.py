"""Means of a study's scores by model and group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from biphasic.report.statistics import holm, mean_interval
from biphasic.report.study_scores import Column, ScoreRow, differences, rows_of_sweep, score_table
from biphasic.report.sweep_scores import collect_scores
from sweeps import MNLI, MSMARCO, SST2, grid_of, records_of

SC = Column("SC")


def rows_of(scores: dict[tuple[str, str, str, int], float]) -> list[ScoreRow]:
    return [ScoreRow(model, "SC", task, name, seed, value) for (model, task, name, seed), value in scores.items()]


def test_a_groups_mean_counts_mnli_once() -> None:
    table = score_table(
        rows_of({
            **{("a", "sst2", "sst2", seed): 0.9 + 0.01 * seed for seed in range(2)},
            **{("a", "mnli", "mnli-m", seed): 0.6 for seed in range(2)},
            **{("a", "mnli", "mnli-mm", seed): 0.8 for seed in range(2)},
        })
    )  # fmt: skip
    assert table.columns == (
        SC, Column("SC", "sst2", "sst2"), Column("SC", "mnli", "mnli-m"), Column("SC", "mnli", "mnli-mm")
    )  # fmt: skip
    assert table.cell("a", SC).by_seed == pytest.approx({0: 0.8, 1: 0.805})
    assert table.is_complete("a", SC)


def test_a_group_without_all_test_sets_has_no_mean() -> None:
    scores = {("a", "sst2", "sst2", 0): 0.9, ("a", "sst2", "sst2", 1): 0.9, ("a", "qqp", "qqp", 1): 0.7}
    table = score_table(rows_of({**scores, ("b", "sst2", "sst2", 0): 0.8}))
    assert table.cell("a", SC).by_seed == {1: pytest.approx(0.8)}
    assert not table.is_complete("a", SC)
    assert table.cell("b", SC).by_seed == {}
    assert (table.has_scores("a"), table.has_scores("b")) == (True, False)
    assert table.cell("b", Column("SC", "sst2", "sst2")).interval == mean_interval([0.8])


def test_a_group_with_a_rate_that_may_change_is_not_complete() -> None:
    rows = rows_of({("a", task, task, seed): 0.9 for task in ("sst2", "qqp") for seed in range(2)})
    rows += rows_of({("b", task, task, seed): 0.8 for task in ("sst2", "qqp") for seed in range(2)})
    open_rate = [replace(row, settled=(row.model, row.task) != ("a", "qqp")) for row in rows]
    table = score_table(open_rate)
    assert not table.is_complete("a", SC) and not table.cell("a", Column("SC", "qqp", "qqp")).settled
    assert table.is_complete("a", Column("SC", "sst2", "sst2")) and table.is_complete("b", SC)


def test_rows_of_a_sweep_give_its_family_means() -> None:
    grid = grid_of(tasks=(SST2, MNLI, MSMARCO))

    def score(cell, name):
        if (cell.model, cell.seed, name) == ("b", 2, "nq"):
            return (0.1, None)
        return 0.5 + cell.lr, 0.5 + 0.1 * cell.seed + 0.01 * len(name) + (0.05 if cell.model == "a" else 0)

    sweep = collect_scores(grid, records_of(grid, score))
    table = score_table(rows_of_sweep(sweep))
    families = {row.title: row for row in sweep.rows if row.task is None}
    assert [column.group for column in table.groups] == ["SC", "IR"]
    for model in ("a", "b"):
        for group, row in families.items():
            assert table.cell(model, Column(group)).by_seed == pytest.approx(sweep.scores[model, row].by_seed)
    assert len(table.cell("b", Column("IR")).by_seed) == 2


def test_a_test_set_of_two_training_tasks_counts_for_each() -> None:
    mldr = replace(MSMARCO, name="mldr", results=(("nq", "nq", "ndcg_at_10"), ("mldr", "mldr", "ndcg_at_10")))
    grid = grid_of(tasks=(replace(MSMARCO, results=MSMARCO.results[1:]), mldr))
    records = records_of(grid, lambda cell, name: (cell.lr, {"msmarco": 0.8, "mldr": 0.2}[cell.task]))
    table = score_table(rows_of_sweep(collect_scores(grid, records)))
    assert [column.title for column in table.columns] == ["IR", "nq (from msmarco)", "nq (from mldr)", "mldr"]
    assert table.cell("a", Column("IR")).by_seed == pytest.approx(dict.fromkeys(range(3), 0.4))


def test_differences_are_paired_and_corrected_together() -> None:
    scores = {
        (model, "sst2", "sst2", seed): base + noise * seed + (0.001 if (model, seed) == ("c", 1) else 0)
        for model, base, noise in (("a", 0.9, 0.01), ("b", 0.8, 0.012), ("c", 0.7, 0.02))
        for seed in range(3)
    }
    table = score_table(rows_of(scores))
    compared = differences(table, [("a", "b"), ("a", "c"), ("b", "missing")])
    assert [(d.first, d.second, d.difference.count) for d in compared] == [("a", "b", 3), ("a", "c", 3)]
    assert compared[0].difference.mean == pytest.approx(0.098)
    assert [d.corrected_p for d in compared] == holm([d.difference.p for d in compared])
