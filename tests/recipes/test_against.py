"""Published scores beside measured ones."""

import csv
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from biphasic.errors import UserError
from biphasic.report.scores import ScoreTable, score_table
from biphasic.report.statistics import mean_interval
from helpers.studies import facets_of_name, score_rows, write_sweep
from helpers.tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes" / "paper"))
against: Any = import_module("against")
COLUMNS = ["model", "group", "score", "source", "second_hand", "note", "test_set", "split", "lr", "seed"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def reference_of(*lines: str) -> pd.DataFrame:
    """Rows as `read_reference` returns them."""
    table = pd.read_csv(io.StringIO("\n".join([",".join(COLUMNS), *lines])), keep_default_na=False).fillna("")
    return table.assign(measured_model=table.model, published=table.score / 100).drop(columns=["score", "note"])


def table_of(**scores: tuple[float, ...]) -> ScoreTable:
    return score_table(
        score_rows({
            (model, "SC", "sst2", "sst2", seed): score
            for model, by_seed in scores.items()
            for seed, score in enumerate(by_seed)
        })
    )  # fmt: skip


def test_the_papers_numbers() -> None:
    reference = against.read_reference()
    cells = reference[reference.test_set != ""]
    assert len(cells) == 56 and cells.second_hand.eq("no").all() and cells.source.str.contains(" results/").all()
    mldr = cells.query("model == '610m-clm-42k' and test_set == 'mldr' and split == 'test' and lr == '5e-05'")
    assert mldr.published.mean() == pytest.approx(0.5314, abs=5e-5) and len(mldr) == 5
    scores = reference[reference.test_set == ""].set_index(["model", "group"])
    assert len(scores) == 68
    assert scores.published["610m-clm-10k-mlm40-42k", "QA"] == 0.6777
    assert scores.published["610m-clm-dec42k-mlm40-64k", "IR"] == 0.807
    assert scores.published["610m-mlm40-42k-5000", "QA"] == 0.2789
    assert scores.second_hand.eq("yes").all() and scores.source.str.contains("arXiv 2507.00994").all()
    for model, _ in scores.index:
        facets_of_name(model)  # a name as on the hub


def test_differences_to_published_scores() -> None:
    lines = [f"{line},,,," for line in ("a,SC,80.5,paper,yes,", "b,SC,70,paper,no,", "a,IR,60,paper,no,")]
    reference = reference_of(*lines)
    compared = against.compare_scores(reference, table_of(a=(0.81, 0.82, 0.83)))
    first = compared.loc[0]
    expected = mean_interval([0.81, 0.82, 0.83])
    assert (first.measured, first.half_width, first.seeds) == pytest.approx((expected.mean, expected.half, 3))
    assert first.difference == pytest.approx(0.015)
    assert list(compared.complete) == [True, False, False], "the second model and the other group have no scores"
    assert compared[["measured", "difference"]].isna().all(axis=1).to_list() == [False, True, True]


def test_orders() -> None:
    lines = [f"{model},SC,{score},paper,no,,,,," for model, score in (
        ("610m-clm-42k", 80), ("610m-mlm40-42k", 82), ("1b-clm-42k", 85), ("1b-mlm40-42k", 82), ("1b-mlm20-42k", 99)
    )]  # fmt: skip
    reference = reference_of(*lines)
    measured = {
        "610m-clm-42k": (0.70, 0.010), "610m-mlm40-42k": (0.80, 0.011),  # clearly the published order
        "1b-clm-42k": (0.75, 0.012), "1b-mlm40-42k": (0.755, 0.001),  # the published order, but not clearly
    }  # fmt: skip
    table = table_of(**{name: tuple(base + noise * seed for seed in range(3)) for name, (base, noise) in measured.items()})
    orders = {(order.first, order.second): order for order in against.compare_orders(reference, table).itertuples()}
    # Equal published scores are no order, and 1b-mlm20-42k is not measured.
    assert len(orders) == 5
    agreeing = orders["610m-mlm40-42k", "610m-clm-42k"]
    assert (agreeing.agrees, agreeing.clear, agreeing.same_size_and_steps) == (True, True, True)
    assert agreeing.published == pytest.approx(0.02)
    assert agreeing.measured == pytest.approx(0.101)
    opposite = orders["1b-clm-42k", "1b-mlm40-42k"]
    assert opposite.measured == pytest.approx(0.006) and not opposite.clear
    other = orders["1b-clm-42k", "610m-mlm40-42k"]
    assert (other.agrees, other.clear, other.same_size_and_steps) == (False, True, False)
    assert other.measured == pytest.approx(-0.049)


def test_models_at_another_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file says which measured model takes the place of a published one; the pages show both."""
    names = {"1m-clm-100": 0.0, "1m-mlm40-100": 0.05}

    def score(cell, name):
        value = 0.5 + names[cell.model] + 0.001 * cell.seed * (1 + 10 * names[cell.model])
        return value, value

    write_sweep(tmp_path / "sweep", list(names), score)
    models = tmp_path / "models.yaml"
    models.write_text("610m-clm-42k: 1m-clm-100\n610m-mlm40-42k: 1m-mlm40-100\n")
    assert against.main([str(tmp_path / "sweep"), "--models", str(models)]) == 0
    page = capsys.readouterr().out
    assert "| 610m-mlm40-42k (here 1m-mlm40-100) | SC | 87.00 (second-hand) | 55.15 ± 0.37 (3) | -31.85 |" in page
    assert "| SC | same size and steps | 1 | 1 | 1 | 0 |" in page
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sweep" / "report" / "orders.csv").read_text())))
    assert {(row["first"], row["first_measured"]) for row in rows} == {("610m-mlm40-42k", "1m-mlm40-100")}

    models.write_text("99b-clm-42k: a")
    with pytest.raises(UserError, match="99b-clm-42k: expected a model with published scores"):
        against.read_reference(models)


def test_the_command_writes_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a sweep's output."""
    gain = {"610m-clm-42k": 0.0, "610m-mlm40-42k": 0.05}

    def score(cell, name):
        value = 0.8 + gain[cell.model] + 0.001 * cell.seed * (1 + 10 * gain[cell.model])
        return value, value

    write_sweep(tmp_path / "sweep", list(gain), score)
    assert against.main([str(tmp_path / "sweep")]) == 0
    page = capsys.readouterr().out
    assert "| 610m-mlm40-42k | SC | 87.00 (second-hand) | 85.15 ± 0.37 (3) | -1.85 |" in page
    assert "4 of 68 published scores have a measured one." in page
    assert "| SC | same size and steps | 1 | 1 | 1 | 0 |" in page
    report = tmp_path / "sweep" / "report"
    rows = list(csv.DictReader(io.StringIO((report / "orders.csv").read_text())))
    assert [(row["group"], row["first"], row["agrees"]) for row in rows] == [
        ("SC", "610m-mlm40-42k", "True"),
        ("IR", "610m-mlm40-42k", "True"),
    ]
    assert len(list(csv.DictReader(io.StringIO((report / "against.csv").read_text())))) == 68


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "runs" / "sweep", ["610m-clm-42k"], lambda cell, name: (0.5, 0.5))
    assert against.main([str(tmp_path / "paper"), str(tmp_path / "runs")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{tmp_path / 'paper'}: doesn't exist\n")
    assert not (tmp_path / "paper").exists()


def cells_of(*published: float) -> pd.DataFrame:
    lines = [f"a,IR,{100 * score},paper,no,,mldr,test,5e-05,{seed}" for seed, score in enumerate(published)]
    return reference_of(*lines, "a,IR,50,paper,yes,,,,,", "b,IR,40,paper,no,,mldr,test,5e-05,0")


def trials_of(*measured: float) -> pd.DataFrame:
    rows = [("a", "mldr", 5e-5, seed, float("nan"), score) for seed, score in enumerate(measured)]
    rows += [("a", "mldr", 1e-5, 0, 0.9, 0.9), ("b", "mldr", 5e-5, 0, float("nan"), 0.4)]
    trials = pd.DataFrame(rows, columns=["model", "test_set", "lr", "seed", "validation", "test"])
    return trials.assign(group="IR", trained_on="msmarco")


def test_cells_at_the_same_rate_by_the_pooled_t_test() -> None:
    ours, theirs = [0.53, 0.55, 0.54, 0.535], [0.531, 0.536, 0.528]
    [cell] = against.compare_cells(cells_of(*theirs), trials_of(*ours)).itertuples()
    interval = stats.ttest_ind(ours, theirs).confidence_interval(0.95)
    assert (cell.difference - cell.half_width, cell.difference + cell.half_width) == pytest.approx(tuple(interval))
    assert (cell.measured_model, cell.seeds, cell.published_seeds, cell.agrees) == ("a", 4, 3, True)
    assert not against.compare_cells(cells_of(*(score - 0.1 for score in theirs)), trials_of(*ours)).agrees.any()


def test_a_test_set_of_two_training_tasks_has_a_cell_for_each() -> None:
    trials = [trials_of(0.53, 0.55), trials_of(0.33, 0.35).assign(trained_on="nq")]
    cells = against.compare_cells(cells_of(0.54), pd.concat(trials))
    assert dict(zip(cells.test_set, cells.measured, strict=True)) == pytest.approx(
        {"mldr (from msmarco)": 0.54, "mldr (from nq)": 0.34}
    )
    assert list(cells.seeds) == [2, 2]


def test_one_published_seed_is_compared_with_the_measured_spread() -> None:
    spread = stats.t.ppf(0.975, 2) * 0.02 * (1 + 1 / 3) ** 0.5
    for offset, agrees in ((0.99, True), (1.01, False)):
        [cell] = against.compare_cells(cells_of(0.52 + offset * spread), trials_of(0.50, 0.52, 0.54)).itertuples()
        assert bool(cell.agrees) is agrees
