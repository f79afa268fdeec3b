"""Compare measured scores with published ones: score differences, and which rankings of models agree."""

from __future__ import annotations

import csv
import io
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from scipy import stats

from biphasic.config.model_names import facets_of_models
from biphasic.errors import UserError
from biphasic.report.formatting import (
    csv_table,
    escape,
    format_interval,
    format_points,
    format_rate,
    format_signed,
    markdown_page,
    markdown_table,
)
from biphasic.report.scores import CONFIDENCE, ScoreTable, differences, holm, name_origins
from biphasic.storage import open_store, user_errors

COMPARISON_FILES = ("against.md", "against.csv", "orders.csv", "cells.csv")
_CELL = ["test_set", "split", "lr", "seed"]
_ORDER_COLUMNS = [
    "group", "first", "second", "first_measured", "second_measured", "published", "measured", "half_width", "p", "p_holm",
    "seeds", "agrees", "clear", "same_size_and_steps",
]  # fmt: skip


class ReferenceScore(BaseModel):
    """A published score of a model: a line of the CSV, whose columns are these fields.

    It is the mean of a task group, or a cell: the score on one split of a test set with a learning rate and a seed.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    group: Literal["SC", "TC", "QA", "IR"]
    score: Annotated[float, Field(ge=0, le=100)]
    """In points."""
    source: Annotated[str, Field(min_length=1)]
    second_hand: Literal["yes", "no"]
    """Whether the number comes from another source than the publication itself."""
    note: str
    test_set: str
    """Empty for the group's mean, as are the next three."""
    split: Literal["", "validation", "test"]
    lr: Annotated[float, Field(gt=0)] | Literal[""]
    seed: Annotated[int, Field(ge=0)] | Literal[""]

    @model_validator(mode="after")
    def _require_complete_cell(self) -> ReferenceScore:
        if len({value == "" for value in (self.test_set, self.split, self.lr, self.seed)}) > 1:
            raise ValueError("expected test_set, split, lr and seed of a cell, or none of them")
        return self


COLUMNS = list(ReferenceScore.model_fields)


def read_reference(path: str, models: str | None = None) -> pd.DataFrame:
    """Read a CSV of published scores: its columns without `score`, `published` (0 to 1), and `measured_model`.

    `models` is a YAML of `published model: measured model`, for results at another scale; other models are left out.
    Raises a UserError if a file can't be read or a line is invalid.
    """
    folder, _, name = path.rpartition("/")
    with user_errors(f"{path}: can't be read", ValueError, csv.Error):
        text = io.StringIO(open_store(folder or ".").read(name).decode())
        reader = csv.DictReader(text, restkey="further", restval="", strict=True)
        columns, rows = list(reader.fieldnames or ()), list(reader)
    if columns != COLUMNS:
        raise UserError(f"{path}:1: expected the columns {','.join(COLUMNS)}; got {','.join(columns)}")
    try:
        scores = TypeAdapter(list[ReferenceScore]).validate_python(rows)
    except ValidationError as error:
        problem = error.errors()[0]
        line, *column = problem["loc"]
        where = f"{path}:{int(line) + 2}: {column[0] if column else 'line'}"
        raise UserError(f"{where}: {problem['msg']}; got {problem['input']!r}") from None
    table = pd.DataFrame([score.model_dump() for score in scores], columns=COLUMNS)
    for row in table[table.duplicated(["model", "group", *_CELL])].itertuples():
        raise UserError(f"{path}:{row.Index + 2}: {row.model} has another score in {row.group}")
    names = _measured_models(models, set(table.model)) if models is not None else {name: name for name in table.model}
    table = table[table.model.isin(list(names))]
    table["measured_model"], table["published"] = table.model.map(names), (table.score / 100).round(10)
    table["second_hand"] = table.second_hand == "yes"
    return table.drop(columns=["score", "note"])


def compare_scores(reference: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return published means of groups beside the measured ones, which are NaN where they are missing.

    `difference`: measured minus published. `complete`: no missing trial could change the measured score.
    """
    means = table.means.reset_index().query("test_set == '' and seeds > 0").rename(columns={"score": "measured"})
    means = means[["model", "group", "measured", "half_width", "seeds", "complete", "text"]]
    compared = _group_means(reference).merge(
        means.rename(columns={"model": "measured_model"}), "left", ["measured_model", "group"]
    )
    complete, seeds = compared.complete.eq(True), compared.seeds.fillna(0).astype(int)
    return compared.assign(complete=complete, seeds=seeds, difference=compared.measured - compared.published)


def compare_cells(reference: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return published cells beside those of a sweep's `trial_table` at the same rate, as means over the seeds.

    The difference has the 95% interval of the t-test with pooled variance; with one published seed, the spread is that of
    the measured ones, of which there are at least two. `agrees`: the interval includes zero. A test set of several
    training tasks has a cell for each.
    """
    cells = reference[reference.test_set != ""]
    cells = cells.assign(score=cells.published, lr=pd.to_numeric(cells.lr)).drop(columns="model")
    key = ["measured_model", "test_set", "split", "lr"]
    measured = trials.rename(columns={"model": "measured_model"}).assign(named=name_origins(trials).test_set)
    columns = ["measured_model", "named", *_CELL[::2], "seed"]
    measured = measured.melt(columns, ["validation", "test"], "split", "score").dropna()
    ours, theirs = (
        table.groupby(by).score.agg(["mean", "var", "count"]).reset_index()
        for table, by in ((measured, [*key, "named"]), (cells, key))
    )
    both = ours.merge(theirs, on=key, suffixes=("", "_published"))
    both["test_set"] = both.pop("named")
    both = both[both["count"] > 1]
    freedom = both["count"] + both.count_published - 2
    squares = both["var"] * (both["count"] - 1) + both.var_published.fillna(0.0) * (both.count_published - 1)
    error = (squares / freedom * (1 / both["count"] + 1 / both.count_published)) ** 0.5
    half, difference = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error, both["mean"] - both.mean_published
    names = {"mean": "measured", "count": "seeds", "mean_published": "published", "count_published": "published_seeds"}
    both = both.assign(difference=difference, half_width=half, agrees=difference.abs() <= half)
    return both.rename(columns=names).drop(columns=["var", "var_published"])


def _group_means(reference: pd.DataFrame) -> pd.DataFrame:
    return reference[reference.test_set == ""].drop(columns=_CELL)


def compare_orders(reference: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return, for each group and pair of models with different published scores, whether the measured order agrees.

    `first` is the model with the better published score. Pairs without a common seed are left out. P-values are
    corrected by Holm's method over these pairs. `agrees`: the measured order is the published one. `clear`: the 95%
    interval of the measured difference excludes zero.
    """
    reference = _group_means(reference)
    orders = differences(table, list(combinations(reference.measured_model.unique(), 2)), table.groups)
    renamed = {"difference": "measured", "first": "first_measured", "second": "second_measured"}
    orders = orders[orders.seeds > 0].rename(columns=renamed)
    published = reference[["measured_model", "group", "model", "published"]]
    for side in ("first", "second"):
        of_side = published.set_axis([f"{side}_measured", "group", side, f"{side}_score"], axis=1)
        orders = orders.merge(of_side, on=[f"{side}_measured", "group"])
    orders["published"] = orders.first_score - orders.second_score
    worse = orders.published < 0
    orders.loc[worse, ["published", "measured"]] *= -1
    for names in (["first", "second"], ["first_measured", "second_measured"]):
        orders.loc[worse, names] = orders.loc[worse, names[::-1]].to_numpy()
    orders["agrees"], orders["clear"] = orders.measured > 0, orders.measured.abs() > orders.half_width
    facets, _ = facets_of_models(list(reference.model.unique()), {})
    budgets = {name: f"{of_model.size} {of_model.steps}" for name, of_model in facets.items()}
    # A name of another form has NaN, which equals nothing.
    orders["same_size_and_steps"] = orders["first"].map(budgets) == orders["second"].map(budgets)
    orders = orders[orders.published != 0]
    return orders.assign(p_holm=holm(orders.p.astype(float)))[_ORDER_COLUMNS]


def comparison_files(
    path: str, reference: pd.DataFrame, table: ScoreTable, trials: pd.DataFrame | None
) -> dict[str, bytes]:
    """Return the files that compare measured scores with the published ones in `path`; `trials` are those of a sweep."""
    scores, orders = compare_scores(reference, table), compare_orders(reference, table)
    files = {"against.csv": csv_table(scores.drop(columns="text")), "orders.csv": csv_table(orders)}
    lines = [f"# Against {escape(path)}", "", *_scores_section(scores), *_orders_section(orders)]
    if trials is not None:
        cells = compare_cells(reference, trials)
        files["cells.csv"] = csv_table(cells)
        lines += _cells_section(cells)
    return {"against.md": markdown_page(lines), **files}


def _scores_section(scores: pd.DataFrame) -> list[str]:
    body = [
        [_shown_name(row.model, row.measured_model), row.group,
         format_points(row.published) + (" (second-hand)" if row.second_hand else ""), row.text,
         format_signed(row.difference)]
        for row in scores[scores.seeds > 0].itertuples()
    ]  # fmt: skip
    header = ["model", "group", "published", "measured", "measured minus published"]
    absent = len(scores) - len(body)
    return [
        *["## Scores", "", *markdown_table(header, body)],
        f"{len(body)} of {len(scores)} published scores have a measured one; {absent} don't. Points: mean ± half of the 95%",
        "interval over seeds, with the number of seeds in brackets. Second-hand: not read in the publication itself.",
        "",
    ]


def _cells_section(cells: pd.DataFrame) -> list[str]:
    body = [
        [escape(row.measured_model), escape(row.test_set), row.split, format_rate(row.lr),
         f"{format_points(row.measured)} ({row.seeds})", f"{format_points(row.published)} ({row.published_seeds})",
         format_interval(row.difference, row.half_width, format_signed), "yes" if row.agrees else "no"]
        for row in cells.itertuples()
    ]  # fmt: skip
    header = ["model", "test set", "split", "rate", "measured (seeds)", "published (seeds)", "difference", "agrees"]
    return [
        "",
        "## At the same rate",
        "",
        *(markdown_table(header, body) or ["No published cell has two measured seeds."]),
    ]


def _orders_section(orders: pd.DataFrame) -> list[str]:
    if orders.empty:
        return ["## Orders", "", "No two models with published scores have measured ones."]
    body = []
    for group, of_group in orders.groupby("group", sort=False):
        for title, rows in (("all", of_group), ("same size and steps", of_group[of_group.same_size_and_steps])):
            counts = len(rows), rows.agrees.sum(), (rows.agrees & rows.clear).sum(), (~rows.agrees & rows.clear).sum()
            body.append([group, title, *counts])
    opposite = [
        [row.group, _shown_name(row.first, row.first_measured), _shown_name(row.second, row.second_measured),
         format_signed(row.published), format_interval(row.measured, row.half_width, format_signed)]
        for row in orders[~orders.agrees].itertuples()
    ]  # fmt: skip
    return [
        *["## Orders", ""],
        "For two models of the table, whether the one with the better published score also has the better measured one.",
        "Clearly: the 95% interval of the measured difference, paired by seed, doesn't contain zero. Models of different",
        "sizes or steps are easily in the same order.",
        "",
        *markdown_table(["group", "models", "orders", "agree", "clearly", "clearly opposite"], body),
        *(["These don't agree:", ""] if opposite else []),
        *markdown_table(["group", "published better", "published worse", "published", "measured"], opposite),
    ]


def _measured_models(path: str, published: set[str]) -> dict[str, str]:
    with user_errors(f"{path}: can't be read", ValueError, yaml.YAMLError):
        names = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(names, dict) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise UserError(f"{path}: expected lines of `published model: measured model`")
    for name in sorted(names.keys() - published):
        raise UserError(f"{path}: {name}: expected a model with published scores")
    if len(set(names.values())) < len(names):
        raise UserError(f"{path}: expected another measured model for each published one")
    return names


def _shown_name(model: str, measured: str) -> str:
    return escape(model) if measured == model else f"{escape(model)} (here {escape(measured)})"
