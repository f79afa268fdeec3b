"""Compare measured scores with published ones: differences, and which orders of models agree."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import yaml

from biphasic.errors import UserError
from biphasic.report.formatting import csv_table, escape, format_interval, format_points, format_signed, markdown_table
from biphasic.report.statistics import Difference, Interval
from biphasic.report.study_models import facets_of_name
from biphasic.report.study_scores import Column, ScoreTable, differences
from biphasic.report.sweep_scores import FAMILIES
from biphasic.storage import first_line, open_store

COMPARISON_FILES = ("against.md", "against.csv", "orders.csv")
COLUMNS = ("model", "group", "score", "source", "second_hand", "note")


@dataclass(frozen=True)
class ReferenceScore:
    """A published mean score of a model in a task group."""

    model: str
    group: str
    score: float
    """From 0 to 1; the file has points."""
    source: str
    second_hand: bool
    """Whether the number was not read in the publication itself."""
    note: str
    measured_as: str
    """The measured model that is compared: the same name, unless a study at another scale has a model in its place."""


@dataclass(frozen=True)
class ComparedScore:
    """A published score beside the measured one."""

    reference: ReferenceScore
    measured: Interval | None
    """None if the results have no mean of this model in this group."""
    complete: bool
    """Whether no missing trial could change the measured score."""

    @property
    def difference(self) -> float | None:
        """The measured minus the published score."""
        return None if self.measured is None else self.measured.mean - self.reference.score


@dataclass(frozen=True)
class ComparedOrder:
    """The published and the measured difference between two models."""

    first: ReferenceScore
    """The model with the better published score."""
    second: ReferenceScore
    measured: Difference
    corrected_p: float | None
    same_budget: bool
    """Whether both models have the same size and number of steps. An order of others is easier to agree with."""

    @property
    def published(self) -> float:
        """The published difference, which is positive."""
        return self.first.score - self.second.score

    @property
    def agrees(self) -> bool:
        """Whether the measured order is the published one."""
        return self.measured.mean > 0

    @property
    def clear(self) -> bool:
        """Whether the 95% interval of the measured difference lies on one side of zero."""
        return self.measured.half is not None and abs(self.measured.mean) > self.measured.half


def read_reference(path: str) -> list[ReferenceScore]:
    """Read a CSV of published scores, in points, with the columns `model group score source second_hand note`.

    Raises:
        UserError: the file can't be read, or a line is wrong.
    """
    folder, _, name = path.rpartition("/")
    try:
        text = open_store(folder or ".").read(name).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({first_line(error)})") from None
    reader = csv.DictReader(io.StringIO(text), strict=True)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise UserError(f"{path}:1: expected the columns {','.join(COLUMNS)}; got {','.join(reader.fieldnames or ())}")
    scores: dict[tuple[str, str], ReferenceScore] = {}
    for row in reader:
        score = _reference_score(row, f"{path}:{reader.line_num}")
        if scores.setdefault((score.model, score.group), score) is not score:
            raise UserError(f"{path}:{reader.line_num}: {score.model} has another score in {score.group}")
    return list(scores.values())


def in_place_of(reference: Sequence[ReferenceScore], path: str) -> list[ReferenceScore]:
    """Return the scores of the published models for which a YAML of `published model: measured model` has an entry.

    Raises:
        UserError: the file can't be read, names a model without published scores, or a measured model twice.
    """
    try:
        names = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: can't be read ({first_line(error)})") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise UserError(f"{path}: expected lines of `published model: measured model`")
    published = {score.model for score in reference}
    for name in names:
        if name not in published:
            raise UserError(f"{path}: {name}: expected a model with published scores")
    if len(set(names.values())) < len(names):
        raise UserError(f"{path}: expected another measured model for each published one")
    return [replace(score, measured_as=names[score.model]) for score in reference if score.model in names]


def compare_scores(reference: Sequence[ReferenceScore], table: ScoreTable) -> list[ComparedScore]:
    """Return each published score with the measured one."""
    return [
        ComparedScore(
            score,
            table.cell(score.measured_as, Column(score.group)).interval,
            table.is_complete(score.measured_as, Column(score.group)),
        )
        for score in reference
    ]  # fmt: skip


def compare_orders(reference: Sequence[ReferenceScore], table: ScoreTable) -> list[ComparedOrder]:
    """Return, for each group and two models with different published scores, whether the measured order agrees.

    Models without measured scores with a common seed are left out. P-values are corrected by Holm's method over all.
    """
    scores = {(score.measured_as, score.group): score for score in reference}
    models = [model for model in dict.fromkeys(score.measured_as for score in reference) if table.has_scores(model)]
    budgets = {score.model: _budget(score.model) for score in reference}
    orders: list[ComparedOrder] = []
    for compared in differences(table, list(combinations(models, 2))):
        first = scores.get((compared.first, compared.column.group))
        second = scores.get((compared.second, compared.column.group))
        if first is None or second is None or first.score == second.score:
            continue
        measured = compared.difference
        if first.score < second.score:
            first, second = second, first
            measured = Difference(-measured.mean, measured.half, measured.count, measured.p)
        budget = budgets[first.model]
        same_budget = budget is not None and budget == budgets[second.model]
        orders.append(ComparedOrder(first, second, measured, compared.corrected_p, same_budget))
    return orders


def comparison_files(path: str, reference: Sequence[ReferenceScore], table: ScoreTable) -> dict[str, bytes]:
    """Return the files of a comparison by name.

    Args:
        path: the reference's file, as shown.
        reference: the published scores.
        table: the measured scores.
    """
    scores, orders = compare_scores(reference, table), compare_orders(reference, table)
    lines = [f"# Against {escape(path)}", "", *_scores_section(scores), *_orders_section(orders)]
    page = ("\n".join(lines).rstrip() + "\n").encode()
    return dict(zip(COMPARISON_FILES, (page, _scores_csv(scores), _orders_csv(orders)), strict=True))


def _scores_section(scores: Sequence[ComparedScore]) -> list[str]:
    body = []
    for compared in scores:
        reference, measured, difference = compared.reference, compared.measured, compared.difference
        if measured is None or difference is None:
            continue
        seeds = f"{measured.count}" + ("" if compared.complete else ", not final")
        body.append([
            *(_shown_name(reference), escape(reference.group)),
            format_points(reference.score) + (" (second-hand)" if reference.second_hand else ""),
            f"{format_interval(measured, format_points)} ({seeds})",
            format_signed(difference),
        ])  # fmt: skip
    header = ["model", "group", "published", "measured", "measured minus published"]
    absent = len(scores) - len(body)
    return [
        *["## Scores", ""],
        *(markdown_table(header, body) if body else []),
        f"{len(body)} of {len(scores)} published scores have a measured one; {absent} don't. Points: mean ± half of the 95%",
        "interval over seeds, with the number of seeds in brackets. Second-hand: not read in the publication itself.",
        "",
    ]


def _orders_section(orders: Sequence[ComparedOrder]) -> list[str]:
    if not orders:
        return ["## Orders", "", "No two models with published scores have measured ones.", ""]
    body = []
    for group in dict.fromkeys(order.first.group for order in orders):
        for title, chosen in (
            ("all", [order for order in orders if order.first.group == group]),
            ("same size and steps", [order for order in orders if order.first.group == group and order.same_budget]),
        ):
            agreeing = [order for order in chosen if order.agrees]
            clearly = sum(order.clear for order in agreeing)
            opposite = sum(order.clear for order in chosen if not order.agrees)
            body.append([escape(group), title, *map(str, (len(chosen), len(agreeing), clearly, opposite))])
    lines = [
        *["## Orders", ""],
        "For two models of the table, whether the one with the better published score also has the better measured one.",
        "Clearly: the 95% interval of the measured difference, paired by seed, doesn't contain zero. Models of different",
        "sizes or steps are easily in the same order.",
        "",
        *markdown_table(["group", "models", "orders", "agree", "clearly", "clearly opposite"], body),
    ]
    opposite = [order for order in orders if not order.agrees]
    if opposite:
        body = [
            [
                *(escape(order.first.group), _shown_name(order.first), _shown_name(order.second)),
                format_signed(order.published),
                format_interval(order.measured, format_signed),
            ]
            for order in opposite
        ]
        lines += ["These don't agree:", ""]
        lines += markdown_table(["group", "published better", "published worse", "published", "measured"], body)
    return lines


def _scores_csv(scores: Sequence[ComparedScore]) -> bytes:
    rows = []
    for compared in scores:
        reference, measured = compared.reference, compared.measured
        numbers = (measured.mean, measured.half, measured.count) if measured is not None else (None, None, 0)
        rows.append([
            *(reference.model, reference.measured_as, reference.group, reference.score, *numbers, compared.difference),
            *("yes" if compared.complete else "no", reference.source, "yes" if reference.second_hand else "no"),
        ])  # fmt: skip
    columns = "model measured_model group published measured half_width seeds difference complete source second_hand"
    return csv_table(columns, rows)


def _orders_csv(orders: Sequence[ComparedOrder]) -> bytes:
    rows = []
    for order in orders:
        measured = order.measured
        rows.append([
            *(order.first.group, order.first.model, order.second.model, order.first.measured_as, order.second.measured_as),
            *(order.published, measured.mean, measured.half),
            *(measured.p, order.corrected_p, measured.count),
            *("yes" if answer else "no" for answer in (order.agrees, order.clear, order.same_budget)),
        ])  # fmt: skip
    columns = (
        "group first second first_measured second_measured published measured half_width p p_holm seeds agrees clear"
    )
    return csv_table(f"{columns} same_size_and_steps", rows)


def _reference_score(row: dict[str, str], where: str) -> ReferenceScore:
    if None in row or None in row.values():
        raise UserError(f"{where}: expected {len(COLUMNS)} fields")
    if row["group"] not in FAMILIES.values():
        raise UserError(f"{where}: group: expected one of {', '.join(FAMILIES.values())}; got {row['group']!r}")
    if row["second_hand"] not in ("yes", "no"):
        raise UserError(f"{where}: second_hand: expected yes or no; got {row['second_hand']!r}")
    if not row["source"]:
        raise UserError(f"{where}: source: is missing")
    try:
        points = float(row["score"])
    except ValueError:
        points = -1.0
    if not 0 <= points <= 100:
        raise UserError(f"{where}: score: expected points from 0 to 100; got {row['score']!r}")
    score = round(points / 100, 10)
    second_hand = row["second_hand"] == "yes"
    return ReferenceScore(
        row["model"], row["group"], score, row["source"], second_hand, row["note"], measured_as=row["model"]
    )


def _shown_name(reference: ReferenceScore) -> str:
    if reference.measured_as == reference.model:
        return escape(reference.model)
    return f"{escape(reference.model)} (here {escape(reference.measured_as)})"


def _budget(model: str) -> tuple[str, int] | None:
    """Return a model's size and steps by its name; None if the name doesn't say them."""
    try:
        facets = facets_of_name(model)
    except UserError:
        return None
    return facets.size, facets.steps
