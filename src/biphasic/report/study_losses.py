"""Collect the losses of a study's runs from their metrics, and draw them with phase switches and decays."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from biphasic.config.pretrain import PretrainConfig
from biphasic.report.drawing import draw_curves, plain
from biphasic.report.statistics import intervals
from biphasic.timeline import decay_start, resolve_phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 200
"""Maximum number of points in a run's training curve. Batches are averaged so that a figure of 38 runs is readable."""
MIN_BATCHES = 5
"""Minimum number of batches in a point: the interval of the mean of two or three is very wide."""
COLUMNS = ["run", "kind", "objective", "step", "loss", "half_width", "batches"]
LOSS = re.compile(r"loss/train/(?P<trained>(?!.*_bits_per_byte$).+)|metrics/(?P<validated>.+)/loss")
_MARKERS = {"switch": "D", "decay": "v"}


def loss_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return losses or events as a table with `COLUMNS`."""
    table = pd.DataFrame([*rows], columns=COLUMNS)
    return table.astype(dict.fromkeys(("step", "loss", "half_width", "batches"), float))


def loss_points(run: str, metrics: Any, base_steps: int) -> pd.DataFrame:
    """Return a run's losses in nats per predicted token, with `COLUMNS`, from arrays by key or each batch's metrics.

    NaN and Inf are left out. A `training` loss is the mean over a window of batches; `half_width` is that of its 95%
    interval, and `step` the mean step, counted from `base_steps`. A `validation` loss is that of a single validation.
    """
    table = pd.DataFrame(metrics)
    width = max(math.ceil(len(table) / MAX_POINTS), MIN_BATCHES)
    parts = [loss_table([])]
    for key in sorted(table.columns):
        match = LOSS.fullmatch(str(key))
        if match is not None and match[0] != "loss/train/total":
            kind, objective = "validation" if match["validated"] else "training", match["validated"] or match["trained"]
            finite = table[np.isfinite(table[key].astype(float))]
            windows = (finite.batch - 1) // width if kind == "training" else finite.batch
            # The mean of a few batches would look like a jump at the end of the curve.
            if kind == "training" and (windows == windows.max()).sum() < width / 2:
                windows = windows.mask((windows == windows.max()) & (windows.max() - 1 in set(windows)), windows - 1)
            points = intervals(finite[key].groupby(windows)).rename(columns={"mean": "loss", "count": "batches"})
            step = base_steps + finite.batch.groupby(windows).mean()
            parts.append(points.assign(run=run, kind=kind, objective=objective, step=step)[COLUMNS])
    return pd.concat(parts, ignore_index=True)


def loss_events(run: str, config: PretrainConfig, base_steps: int) -> pd.DataFrame:
    """Return the steps of a run's phase switches and decay start, with `COLUMNS`. Times in epochs are left out."""
    times = [("switch", span.start) for span in resolve_phases(config.objective.phases, config.max_duration)[1:]]
    decay = decay_start(config.schedule, config.max_duration)
    times += [("decay", decay)] if decay != config.max_duration else []
    rows = [
        {"run": run, "kind": kind, "step": float(base_steps + config.batch_shapes.batches(time))}
        for kind, time in times
        if time.unit != "ep"
    ]
    return loss_table(rows)


def losses_figure(losses: pd.DataFrame) -> Figure:
    """Draw losses by steps, with a panel for each split and objective.

    Bands: 95% intervals over the batches of a point. Diamonds: phase switches. Triangles: starts of decays.
    """
    points = losses[losses.loss.notna()].sort_values(["kind", "objective", "run", "step"])
    panels, half = points.objective.str.upper() + ", " + points.kind, points.half_width.fillna(0)
    places = {"panel": panels, "line": points.run, "x": points.step, "y": points.loss}
    points = points.assign(**places, low=points.loss - half, high=points.loss + half)
    y_label = "loss (nats per predicted token)"
    figure = draw_curves(points, "pretraining steps", y_label, band=True, columns=2, size=(6.8, 3.8))
    colors = {line.get_label(): line.get_color() for axes in figure.axes for line in axes.get_lines()}
    events = losses[losses.kind.isin(list(_MARKERS))]
    for title, axes in zip(points.panel.unique(), figure.axes, strict=True):
        for event in events.itertuples():
            curve = points[(points.panel == title) & (points.run == event.run)]
            distance = (curve.step - event.step).abs()
            # The curve may end before the event, or start after it.
            if distance.min() <= max(curve.step.max() - curve.step.min(), 10.0) / 10:
                loss = curve.loss[distance.idxmin()]
                axes.plot([event.step], [loss], _MARKERS[event.kind], color=colors[plain(event.run)], markersize=5)
    return figure
