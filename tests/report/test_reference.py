"""Published scores beside measured ones."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.report.reference import (
    COLUMNS,
    COMPARISON_FILES,
    compare_orders,
    compare_scores,
    in_place_of,
    read_reference,
)
from biphasic.report.statistics import mean_interval
from biphasic.report.study_models import facets_of_name
from biphasic.report.study_scores import ScoreRow, ScoreTable, score_table
from studies import write_sweep

PAPER = Path(__file__).parents[2] / "recipes" / "paper" / "reference.csv"


def write_reference(folder: Path, *lines: str) -> str:
    file = folder / "reference.csv"
    file.write_text("\n".join([",".join(COLUMNS), *lines, ""]), encoding="utf-8")
    return str(file)


def table_of(**scores: tuple[float, ...]) -> ScoreTable:
    return score_table(
        ScoreRow(model.replace("_", "-"), "SC", "sst2", "sst2", seed, score)
        for model, by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    )


def test_the_papers_numbers() -> None:
    scores = {(score.model, score.group): score for score in read_reference(str(PAPER))}
    assert len(scores) == 68
    assert scores["610m-clm-10k-mlm40-42k", "QA"].score == 0.6777
    assert scores["610m-clm-dec42k-mlm40-64k", "IR"].score == 0.807
    assert scores["610m-mlm40-42k-5000", "QA"].score == 0.2789
    assert all(score.second_hand and "arXiv 2507.00994" in score.source for score in scores.values())
    for model, _ in scores:
        facets_of_name(model)  # a name as on the hub


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,SC,80,paper", "expected 6 fields"),
        ("a,SC,80,paper,no,,more", "expected 6 fields"),
        ("a,NER,80,paper,no,", "group: expected one of SC, TC, QA, IR; got 'NER'"),
        ("a,SC,high,paper,no,", "score: expected points from 0 to 100; got 'high'"),
        ("a,SC,800,paper,no,", "score: expected points from 0 to 100; got '800'"),
        ("a,SC,80,paper,true,", "second_hand: expected yes or no; got 'true'"),
        ("a,SC,80,,no,", "source: is missing"),
        ("b,SC,81,paper,no,", "b has another score in SC"),
    ],
)
def test_a_wrong_line_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = write_reference(tmp_path, "b,SC,80,paper,no,", line)
    with pytest.raises(UserError) as raised:
        read_reference(path)
    assert str(raised.value) == f"{path}:3: {message}"


def test_files_that_are_not_a_reference(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_reference(str(tmp_path / "absent.csv"))
    (tmp_path / "other.csv").write_text("model,score\n")
    with pytest.raises(
        UserError, match=r"expected the columns model,group,score,source,second_hand,note; got model,score"
    ):
        read_reference(str(tmp_path / "other.csv"))


def test_differences_to_published_scores(tmp_path: Path) -> None:
    reference = read_reference(
        write_reference(tmp_path, "a,SC,80.5,paper,yes,", "b,SC,70,paper,no,", "a,IR,60,paper,no,")
    )
    first, absent, other_group = compare_scores(reference, table_of(a=(0.81, 0.82, 0.83)))
    assert first.measured == mean_interval([0.81, 0.82, 0.83])
    assert first.difference == pytest.approx(0.015)
    assert first.complete
    assert (absent.measured, absent.difference) == (None, None)
    assert other_group.measured is None


def test_orders(tmp_path: Path) -> None:
    lines = [f"{model},SC,{score},paper,no," for model, score in (
        ("610m-clm-42k", 80), ("610m-mlm40-42k", 82), ("1b-clm-42k", 85), ("1b-mlm40-42k", 82), ("1b-mlm20-42k", 99)
    )]  # fmt: skip
    reference = read_reference(write_reference(tmp_path, *lines))
    table = score_table(
        ScoreRow(model, "SC", "sst2", "sst2", seed, base + noise * seed)
        for model, base, noise in (
            ("610m-clm-42k", 0.70, 0.010), ("610m-mlm40-42k", 0.80, 0.011),  # clearly the published order
            ("1b-clm-42k", 0.75, 0.012), ("1b-mlm40-42k", 0.755, 0.001),  # not the published order, and not clearly
        )
        for seed in range(3)
    )  # fmt: skip
    orders = {(order.first.model, order.second.model): order for order in compare_orders(reference, table)}
    # Equal published scores are no order, and 1b-mlm20-42k is not measured.
    assert len(orders) == 5
    agreeing = orders["610m-mlm40-42k", "610m-clm-42k"]
    assert (agreeing.agrees, agreeing.clear, agreeing.same_budget) == (True, True, True)
    assert agreeing.published == pytest.approx(0.02)
    assert agreeing.measured.mean == pytest.approx(0.101)
    opposite = orders["1b-clm-42k", "1b-mlm40-42k"]
    assert opposite.measured.mean == pytest.approx(0.006)
    other = orders["1b-clm-42k", "610m-mlm40-42k"]
    assert (other.agrees, other.clear, other.same_budget) == (False, True, False)
    assert other.measured.mean == pytest.approx(-0.049)


def test_models_at_another_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file says which measured model takes the place of a published one; the pages show both."""
    names = {"1m-clm-100": 0.0, "1m-mlm40-100": 0.05}

    def score(cell, name):
        value = 0.5 + names[cell.model] + 0.001 * cell.seed * (1 + 10 * names[cell.model])
        return value, value

    write_sweep(tmp_path / "sweep", list(names), score)
    models = tmp_path / "models.yaml"
    models.write_text("610m-clm-42k: 1m-clm-100\n610m-mlm40-42k: 1m-mlm40-100\n")
    assert main(["report", str(tmp_path / "sweep"), "--against", str(PAPER), "--models", str(models)]) == 0
    page = capsys.readouterr().out
    assert "| 610m-mlm40-42k (here 1m-mlm40-100) | SC | 87.00 (second-hand) | 55.15 ± 0.37 (3) | -31.85 |" in page
    assert "| SC | same size and steps | 1 | 1 | 1 | 0 |" in page
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sweep" / "report" / "orders.csv").read_text())))
    assert {(row["first"], row["first_measured"]) for row in rows} == {("610m-mlm40-42k", "1m-mlm40-100")}

    for text, message in (
        ("99b-clm-42k: a", "99b-clm-42k: expected a model with published scores"),
        ("610m-clm-42k: a\n610m-mlm40-42k: a", "expected another measured model for each published one"),
        ("[610m-clm-42k]", "expected lines of `published model: measured model`"),
        ("{", "can't be read"),
    ):
        models.write_text(text)
        with pytest.raises(UserError, match=message):
            in_place_of(read_reference(str(PAPER)), str(models))


def test_the_command_writes_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a sweep's output; the next report without it removes it."""
    gain = {"610m-clm-42k": 0.0, "610m-mlm40-42k": 0.05}

    def score(cell, name):
        value = 0.8 + gain[cell.model] + 0.001 * cell.seed * (1 + 10 * gain[cell.model])
        return value, value

    write_sweep(tmp_path / "sweep", list(gain), score)
    assert main(["report", str(tmp_path / "sweep"), "--against", str(PAPER)]) == 0
    page = capsys.readouterr().out
    assert "| 610m-mlm40-42k | SC | 87.00 (second-hand) | 85.15 ± 0.37 (3) | -1.85 |" in page
    assert "4 of 68 published scores have a measured one; 64 don't." in page
    assert "| SC | same size and steps | 1 | 1 | 1 | 0 |" in page
    report = tmp_path / "sweep" / "report"
    rows = list(csv.DictReader(io.StringIO((report / "orders.csv").read_text())))
    assert [(row["group"], row["first"], row["agrees"]) for row in rows] == [
        ("SC", "610m-mlm40-42k", "yes"),
        ("IR", "610m-mlm40-42k", "yes"),
    ]
    assert len(list(csv.DictReader(io.StringIO((report / "against.csv").read_text())))) == 68
    assert main(["report", str(tmp_path / "sweep")]) == 0
    assert not any((report / name).exists() for name in COMPARISON_FILES)
