"""Draw panels of curves as PNG. Equal numbers give equal bytes, whatever the date and the user's matplotlibrc."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f6f8b", "#c8553d", "#588157", "#7d5ba6", "#d9a404", "#3d405b", "#e07a9b", "#8d6e63", "#00a6a6", "#6c757d")
LINES = ("-", "--", ":", "-.")


@contextmanager
def default_style() -> Iterator[None]:
    """Use matplotlib's default style and bundled font, regardless of the user's matplotlibrc. Also a decorator."""
    import matplotlib as mpl
    from matplotlib.style import context

    with context("default"), mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        yield


def make_panels(
    titles: Sequence[str], columns: int = 4, size: tuple[float, float] = (3.4, 2.8)
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels, `columns` wide. `size` is that of a panel in inches."""
    from matplotlib.figure import Figure

    columns = min(columns, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines + 0.6), dpi=120, layout="constrained")
    panels = [figure.add_subplot(lines, columns, at + 1, title=plain(title)) for at, title in enumerate(titles)]
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure, panels


def draw_curves(
    points: pd.DataFrame,
    x_label: str,
    y_label: str = "test (points)",
    *,
    band: bool = False,
    columns: int = 4,
    size: tuple[float, float] = (3.4, 2.8),
) -> Figure:
    """Draw curves: one panel for each `panel` in `points`, one colour for each `line`.

    `points` has the columns `panel line x y low high`, in the order of panels and lines. From `low` to `high` are error
    bars or a `band`. With a column `complete`, points have markers, which are hollow where it is false.
    """
    panels, lines = list(points.panel.unique()), list(points.line.unique())
    figure, all_axes = make_panels(panels, columns, size)
    curves = dict(iter(points.sort_values("x", kind="stable").groupby(["panel", "line"])))
    for panel, axes in zip(panels, all_axes, strict=True):
        for index, line in enumerate(lines):
            if (curve := curves.get((panel, line))) is None:
                continue
            style = line_style(index)
            color = style["color"]
            axes.plot(curve.x, curve.y, **style, label=plain(line), linewidth=1.4)
            if band:
                axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
            else:
                errors = [curve.y - curve.low, curve.high - curve.y]
                axes.errorbar(curve.x, curve.y, yerr=errors, fmt="none", ecolor=color, capsize=2)
            if "complete" in curve:
                faces = [color if complete else "white" for complete in curve.complete]
                axes.scatter(curve.x, curve.y, s=16, edgecolors=color, facecolors=faces, zorder=3)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure


def png(figure: Figure) -> bytes:
    """Return the figure as PNG, with a single legend for all panels below them."""
    lines = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(4, len(lines)), frameon=False)
    # A legend of hundreds of models would leave no room for the panels. A row of it takes 0.19 inches.
    figure.set_figheight(figure.get_figheight() + 0.19 * max(math.ceil(len(lines) / 4) - 10, 0))
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def line_style(index: int) -> dict[str, Any]:
    """Return the colour and dash pattern of a line; the first 40 lines differ."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index // len(COLORS) % len(LINES)]}


def plain(text: str) -> str:
    """Escape `$` and a leading underscore: matplotlib reads them as a formula and as a hidden label."""
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")
