"""A sweep's pictures, as PNG. The same numbers give the same bytes: no date, no user's matplotlibrc, the bundled font."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from biphasic.report.sweep_scores import FAMILIES, Row, Sweep, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f6f8b", "#c8553d", "#588157", "#7d5ba6", "#d9a404", "#3d405b", "#e07a9b", "#8d6e63", "#00a6a6", "#6c757d")
LINES = ("-", "--", ":", "-.")
_COLUMNS = 4


def learning_rate_figure(sweep: Sweep) -> bytes | None:
    """Test score against learning rate: a panel for each test set, a line for each model, a band from the least to the most.

    A hollow point rests on fewer seeds than were asked for. None when there are no scores.
    """
    rows = [row for row in sweep.rows if row.task is not None]
    rates = sorted(sweep.grid.learning_rates)
    curves = {(m.name, row): curve(sweep, m.name, row) for m in sweep.grid.models for row in rows}
    rows = [r for r in rows if any(any(curves[m.name, r].values()) for m in sweep.grid.models)]
    if not rows:
        return None
    with _defaults():
        figure, panels = _panels(rows, [row.title for row in rows])
        for row, axes in panels:
            for at, model in enumerate(sweep.grid.models):
                found = [[100 * value for value in curves[model.name, row][lr].values()] for lr in rates]
                means = [math.fsum(values) / len(values) if values else math.nan for values in found]
                style = _style(at)
                axes.plot(rates, means, **style, label=_plain(model.name), linewidth=1.6)
                low, high = ([pick(values) if values else math.nan for values in found] for pick in (min, max))
                axes.fill_between(rates, low, high, color=style["color"], alpha=0.15, linewidth=0)
                for lr, mean, values in zip(rates, means, found, strict=True):
                    whole = len(values) == len(sweep.grid.seeds)
                    face = style["color"] if whole else "white"
                    axes.plot([lr], [mean], marker="o", markersize=4, color=style["color"], markerfacecolor=face)
            axes.set_xscale("log")
            axes.set_xlabel("learning rate")
            axes.set_ylabel(f"test, {_plain(row.metric)} (points)")
        return _png(figure, panels[0][1])


def steps_figure(sweep: Sweep) -> bytes | None:
    """Test score against pretraining steps: a panel for each family, a point with its 95% interval for each model.

    Checkpoints of one run are joined: `610m-mlm40-42k-1000` belongs to `610m-mlm40-42k`. None when no model's steps are
    known, or none of those has a family's score.
    """
    known = sorted((m for m in sweep.grid.models if m.steps is not None), key=lambda model: model.steps or 0)
    names = {model.name for model in known}
    rows = [row for row in sweep.rows if row.task is None and any(sweep.entries[name, row].scores for name in names)]
    if not rows:
        return None
    runs = dict.fromkeys(run_of(model.name, names) for model in known)
    with _defaults():
        figure, panels = _panels(rows, [FAMILIES.get(row.family, row.family) for row in rows])
        for row, axes in panels:
            for at, run in enumerate(runs):
                points = []
                for model in known:
                    mean = sweep.entries[model.name, row].mean
                    if run_of(model.name, names) == run and mean is not None:
                        points.append((model.steps or 0, 100 * mean.mean, 100 * (mean.half or 0.0)))
                steps, means, halves = ([point[part] for point in points] for part in range(3))
                axes.errorbar(steps, means, yerr=halves, **_style(at), label=_plain(run), marker="o", capsize=2)
            axes.set_xlabel("pretraining steps")
            axes.set_ylabel("test, mean of tasks (points)")
        return _png(figure, panels[0][1])


def run_of(name: str, names: set[str]) -> str:
    """The run that a model is a checkpoint of: its name without a number of steps at the end, as the paper's are named.

    A name that ends in a number is a checkpoint's only when the run or another checkpoint of it is among `names`.
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


def _panels(rows: list[Row], titles: list[str]) -> tuple[Figure, list[tuple[Row, Axes]]]:
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * lines + 0.6), dpi=120, layout="constrained")
    panels = []
    for at, (row, title) in enumerate(zip(rows, titles, strict=True)):
        axes = figure.add_subplot(lines, columns, at + 1)
        axes.set_title(_plain(title))
        axes.grid(alpha=0.25)
        panels.append((row, axes))
    return figure, panels


def _png(figure: Figure, axes: Axes) -> bytes:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _style(at: int) -> dict[str, Any]:
    return {"color": COLORS[at % len(COLORS)], "linestyle": LINES[at // len(COLORS) % len(LINES)]}


def _plain(text: str) -> str:
    """A name's dollars are no formula, and matplotlib leaves labels out that begin with an underscore."""
    return text.replace("$", r"\$") if not text.startswith("_") else f" {text}".replace("$", r"\$")
