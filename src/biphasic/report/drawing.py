"""Draw panels of curves as PNG. Dates and the user's matplotlibrc are not used, so the same numbers give the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f6f8b", "#c8553d", "#588157", "#7d5ba6", "#d9a404", "#3d405b", "#e07a9b", "#8d6e63", "#00a6a6", "#6c757d")
LINES = ("-", "--", ":", "-.")


@contextmanager
def default_style() -> Iterator[None]:
    """Use matplotlib's defaults and a font that it brings, whatever the user's matplotlibrc says."""
    import matplotlib as mpl
    from matplotlib.style import context

    with context("default"), mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        yield


def make_panels(
    titles: Sequence[str], columns: int = 4, size: tuple[float, float] = (3.4, 2.8)
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title.

    Args:
        titles: the panels' titles.
        columns: the largest number of panels in a line.
        size: width and height of a panel in inches.
    """
    from matplotlib.figure import Figure

    columns = min(columns, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines + 0.6), dpi=120, layout="constrained")
    panels = []
    for index, title in enumerate(titles):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.set_title(plain(title))
        axes.grid(alpha=0.25)
        panels.append(axes)
    return figure, panels


def png(figure: Figure) -> bytes:
    """Return the figure as PNG, with one legend for the lines of all panels below them."""
    lines = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=min(4, len(lines)), frameon=False
    )  # fmt: skip
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def line_style(index: int) -> dict[str, Any]:
    """Return the colour and the dashes of a figure's line, which are different for the first 40 lines."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index // len(COLORS) % len(LINES)]}


def plain(text: str) -> str:
    """Escape dollar signs, which start a formula, and a leading underscore, because matplotlib would hide the label."""
    return text.replace("$", r"\$") if not text.startswith("_") else f" {text}".replace("$", r"\$")
