"""Draw a study's figures of scores, and write their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from biphasic.report.drawing import default_style, line_style, make_panels, plain, png
from biphasic.report.formatting import csv_table, escape, format_interval, format_points, markdown_table
from biphasic.report.study_layouts import FIGURES, Layout, MissingModels, Placement, StudyFigure
from biphasic.report.study_models import Facets
from biphasic.report.study_scores import Column, ModelDifference, ScoreTable, differences


@dataclass(frozen=True)
class ArrangedFigure:
    """A figure whose models have scores."""

    figure: StudyFigure
    layout: Layout
    differences: list[ModelDifference]
    """Between all models with the same line or the same x, corrected over the figure."""


def arrange_figures(table: ScoreTable, models: Mapping[str, Facets]) -> tuple[list[ArrangedFigure], dict[str, str]]:
    """Return the figures that can be drawn, and for each of the others the reason why not, by name."""
    scored = {name: facets for name, facets in models.items() if table.has_scores(name)}
    arranged: list[ArrangedFigure] = []
    missing: dict[str, str] = {}
    for figure in FIGURES:
        try:
            layout = figure.arrange(scored)
        except MissingModels as error:
            missing[figure.name] = str(error)
            continue
        pairs = [
            (first.model, second.model)
            for first, second in combinations(layout.placements, 2)
            if (first.line == second.line or first.x == second.x) and first.model != second.model
        ]
        arranged.append(ArrangedFigure(figure, layout, differences(table, list(dict.fromkeys(pairs)))))
    return arranged, missing


def draw_figure(arranged: ArrangedFigure, table: ScoreTable) -> bytes:
    """Return the figure as PNG: means over seeds with 95% intervals, a panel for each group (and test set).

    A hollow point has fewer seeds than others, or a learning rate that may still change.
    """
    columns = _drawn_columns(arranged, table)
    lines = _lines(arranged.layout)
    with default_style():
        figure, panels = make_panels([column.title for column in columns])
        for column, axes in zip(columns, panels, strict=True):
            for index, (line, placements) in enumerate(lines.items()):
                points = [(p, interval) for p in placements if (interval := table.cell(p.model, column).interval)]
                if not points:
                    continue
                style = line_style(index)
                axes.errorbar(
                    [placement.x for placement, _ in points],
                    [100 * interval.mean for _, interval in points],
                    yerr=[100 * (interval.half or 0.0) for _, interval in points],
                    **style,
                    label=plain(line),
                    capsize=2,
                    linewidth=1.4,
                )  # fmt: skip
                for placement, interval in points:
                    face = style["color"] if table.is_complete(placement.model, column) else "white"
                    axes.plot(
                        [placement.x], [100 * interval.mean], marker="o", markersize=4, color=style["color"],
                        markerfacecolor=face,
                    )  # fmt: skip
            if arranged.layout.ticks is not None:
                axes.set_xticks(list(arranged.layout.ticks), list(map(plain, arranged.layout.ticks.values())))
                axes.set_xlim(-0.4, len(arranged.layout.ticks) - 0.6)
            axes.set_xlabel(arranged.figure.x_label)
            axes.set_ylabel("test, mean of tasks (points)" if not column.task else "test (points)")
        return png(figure)


def figure_csv(arranged: ArrangedFigure, table: ScoreTable) -> bytes:
    """Return the figure's numbers, with a line for each model and group (without a `task`) or test set with scores."""
    ticks = arranged.layout.ticks
    rows = []
    for column in table.columns:
        for placement in arranged.layout.placements:
            cell = table.cell(placement.model, column)
            if (interval := cell.interval) is None:
                continue
            x = ticks[placement.x] if ticks is not None else _whole(placement.x)
            rows.append([
                *(column.group, column.task, column.test_set, placement.line, x, placement.model),
                *(interval.mean, interval.half, interval.count, table.seeds, "yes" if cell.settled else "no"),
            ])  # fmt: skip
    return csv_table("group task test_set line x model mean half_width seeds seeds_asked settled", rows)


def figure_table(arranged: ArrangedFigure, table: ScoreTable) -> list[str]:
    """Return the lines of a Markdown table with the figure's models and their groups' means."""
    ticks, body = arranged.layout.ticks, []
    for placement in arranged.layout.placements:
        x = ticks[placement.x] if ticks is not None else f"{_whole(round(placement.x, 1)):,}"
        cells = [_score(table, placement.model, column) for column in table.groups]
        body.append([escape(placement.line), x, escape(placement.model), *cells])
    header = ["", arranged.figure.x_label, "model", *(escape(column.title) for column in table.groups)]
    return markdown_table(header, body)


def differences_csv(figures: Sequence[ArrangedFigure]) -> bytes:
    """Return the differences of all figures, `first` minus `second`; `p_holm` is corrected over those of one figure."""
    rows = []
    for arranged in figures:
        for compared in arranged.differences:
            difference = compared.difference
            rows.append([
                *(arranged.figure.name, compared.column.group, compared.first, compared.second),
                *(difference.mean, difference.half, difference.p, compared.corrected_p, difference.count),
            ])  # fmt: skip
    return csv_table("figure group first second difference half_width p p_holm seeds", rows)


def _score(table: ScoreTable, model: str, column: Column) -> str:
    cell = table.cell(model, column)
    if cell.interval is None:
        return "missing"
    seeds = len(cell.by_seed)
    count = f"{seeds}" if seeds == table.seeds else f"{seeds} of {table.seeds}"
    return f"{format_interval(cell.interval, format_points)} ({count}{'' if cell.settled else ', rate open'})"


def _whole(x: float) -> float:
    """Return a whole number as an integer, to write it without a point."""
    return int(x) if x == int(x) else x


def _lines(layout: Layout) -> dict[str, list[Placement]]:
    lines: dict[str, list[Placement]] = {}
    for placement in layout.placements:
        lines.setdefault(placement.line, []).append(placement)
    return lines


def _drawn_columns(arranged: ArrangedFigure, table: ScoreTable) -> list[Column]:
    """Return the groups, and for some figures the test sets, in which a model of the figure has a score."""
    tasks = [column for column in table.columns if column.task] if arranged.figure.each_task else []
    models = [placement.model for placement in arranged.layout.placements]
    return [column for column in [*table.groups, *tasks] if any(table.cell(m, column).by_seed for m in models)]
