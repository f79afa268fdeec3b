"""Draw a sweep's figures as PNG."""

from __future__ import annotations

import math
import re
from statistics import fmean

from biphasic.report.drawing import default_style, line_style, make_panels, plain, png
from biphasic.report.sweep_scores import SweepScores, scores_by_rate


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
    with default_style():
        figure, panels = make_panels([row.title for row in rows])
        for row, axes in zip(rows, panels, strict=True):
            for index, name in enumerate(models):
                points = {lr: [100 * score for score in curves[name, row][lr].values()] for lr in rates}
                style = line_style(index)
                means, low, high = (
                    [statistic(scores) if scores else math.nan for scores in points.values()]
                    for statistic in (fmean, min, max)
                )
                axes.plot(rates, means, **style, label=plain(name), linewidth=1.6)
                axes.fill_between(rates, low, high, color=style["color"], alpha=0.15, linewidth=0)
                for (lr, scores), mean in zip(points.items(), means, strict=True):
                    face = style["color"] if len(scores) == len(sweep.grid.seeds) else "white"
                    axes.plot([lr], [mean], marker="o", markersize=4, color=style["color"], markerfacecolor=face)
            axes.set_xscale("log")
            axes.set_xlabel("learning rate")
            axes.set_ylabel(f"test, {plain(row.metric)} (points)")
        return png(figure)


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
    with default_style():
        figure, panels = make_panels([row.title for row in rows])
        for row, axes in zip(rows, panels, strict=True):
            for index, run in enumerate(runs):
                points = [
                    (model.steps or 0, 100 * interval.mean, 100 * (interval.half or 0.0))
                    for model in models
                    if run_of(model.name, names) == run and (interval := sweep.scores[model.name, row].interval)
                ]
                steps, means, halves = ([point[part] for point in points] for part in range(3))
                axes.errorbar(steps, means, yerr=halves, **line_style(index), label=plain(run), marker="o", capsize=2)
            axes.set_xlabel("pretraining steps")
            axes.set_ylabel("test, mean of tasks (points)")
        return png(figure)


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
