"""Draw a sweep's figures as PNG. Dates and the user's matplotlibrc are not used, so the same numbers give the same bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

from biphasic.report.sweep_scores import SweepScores, TableRow, scores_by_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f6f8b", "#c8553d", "#588157", "#7d5ba6", "#d9a404", "#3d405b", "#e07a9b", "#8d6e63", "#00a6a6", "#6c757d")
LINES = ("-", "--", ":", "-.")
_COLUMNS = 4


def learning_rate_figure(sweep: SweepScores) -> bytes | None:
    """Draw test score against learning rate, with a panel for each test set and a line for each model.

    The band around a line is the range over seeds. A hollow point has fewer seeds than the grid. Returns None without
    scores.
    """
    models, rates = [model.name for model in sweep.grid.models], sorted(sweep.grid.learning_rates)
    rows = [row for row in sweep.rows if row.task is not None]
    curves = {(name, row): scores_by_rate(sweep, name, row) for name in models for row in rows}
    rows = [row for row in rows if any(any(curves[name, row].values()) for name in models)]
    if not rows:
        return None
    with _defaults():
        figure, panels = _panels(rows)
        for row, axes in panels:
            for index, name in enumerate(models):
                points = {lr: [100 * score for score in curves[name, row][lr].values()] for lr in rates}
                style = _style(index)
                means, low, high = (
                    [statistic(scores) if scores else math.nan for scores in points.values()]
                    for statistic in (fmean, min, max)
                )
                axes.plot(rates, means, **style, label=_plain(name), linewidth=1.6)
                axes.fill_between(rates, low, high, color=style["color"], alpha=0.15, linewidth=0)
                for (lr, scores), mean in zip(points.items(), means, strict=True):
                    face = style["color"] if len(scores) == len(sweep.grid.seeds) else "white"
                    axes.plot([lr], [mean], marker="o", markersize=4, color=style["color"], markerfacecolor=face)
            axes.set_xscale("log")
            axes.set_xlabel("learning rate")
            axes.set_ylabel(f"test, {_plain(row.metric)} (points)")
        return _png(figure, panels[0][1])


def steps_figure(sweep: SweepScores) -> bytes | None:
    """Draw test score against pretraining steps, with a panel for each task family and a point for each model.

    Error bars are 95% intervals. A line joins the checkpoints of a run: `610m-mlm40-42k-1000` belongs to `610m-mlm40-42k`.
    Returns None if no model with known steps has a score for a family.
    """
    models = sorted((m for m in sweep.grid.models if m.steps is not None), key=lambda model: model.steps or 0)
    names = {model.name for model in models}
    families = [row for row in sweep.rows if row.task is None]
    rows = [row for row in families if any(sweep.scores[name, row].by_seed for name in names)]
    if not rows:
        return None
    runs = dict.fromkeys(run_of(model.name, names) for model in models)
    with _defaults():
        figure, panels = _panels(rows)
        for row, axes in panels:
            for index, run in enumerate(runs):
                points = [
                    (model.steps or 0, 100 * interval.mean, 100 * (interval.half or 0.0))
                    for model in models
                    if run_of(model.name, names) == run and (interval := sweep.scores[model.name, row].interval)
                ]
                steps, means, halves = ([point[part] for point in points] for part in range(3))
                axes.errorbar(steps, means, yerr=halves, **_style(index), label=_plain(run), marker="o", capsize=2)
            axes.set_xlabel("pretraining steps")
            axes.set_ylabel("test, mean of tasks (points)")
        return _png(figure, panels[0][1])


def run_of(name: str, names: set[str]) -> str:
    """Return the name of a model's run: the model's name without the number of steps at the end, as in the paper.

    The number is removed only if the run or another of its checkpoints is among `names`.
    """
    match = re.fullmatch(r"(.+)-\d+", name)
    if match and any(
        other == match[1] or re.fullmatch(rf"{re.escape(match[1])}-\d+", other) for other in names - {name}
    ):
        return match[1]
    return name


@contextmanager
def _defaults() -> Iterator[None]:
    import matplotlib as mpl
    from matplotlib.style import context

    with context("default"), mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        yield


def _panels(rows: list[TableRow]) -> tuple[Figure, list[tuple[TableRow, Axes]]]:
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * lines + 0.6), dpi=120, layout="constrained")
    panels = []
    for index, row in enumerate(rows):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.set_title(_plain(row.title))
        axes.grid(alpha=0.25)
        panels.append((row, axes))
    return figure, panels


def _png(figure: Figure, axes: Axes) -> bytes:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index // len(COLORS) % len(LINES)]}


def _plain(text: str) -> str:
    """Escape dollar signs, which start a formula, and a leading underscore, because matplotlib would hide the label."""
    return text.replace("$", r"\$") if not text.startswith("_") else f" {text}".replace("$", r"\$")
