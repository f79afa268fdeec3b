"""Collect the losses of a study's runs from their metrics, and draw them with the switches and the decays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from biphasic.config.durations import Duration
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import decay_start, spans
from biphasic.report.drawing import default_style, line_style, make_panels, plain, png
from biphasic.report.formatting import csv_table
from biphasic.report.statistics import mean_interval

MAX_POINTS = 200
"""Points of a run's training loss. Batches are averaged to at most this number, so that 38 runs are readable."""
MIN_BATCHES = 5
"""Batches of a point, at least: the interval of the mean of two or three is very wide."""
_OBJECTIVES = ("clm", "mlm")
_MARKERS = {"switch": "D", "decay": "v"}


@dataclass(frozen=True)
class LossPoint:
    """A run's loss in nats per predicted token."""

    run: str
    split: Literal["training", "validation"]
    objective: str
    """`clm` or `mlm`."""
    step: float
    """The mean of the batches' steps, including those of the model that the run continues."""
    loss: float
    """The mean over the batches."""
    half: float | None
    """Half of its 95% interval over the batches; None for a single batch, and for validation."""
    batches: int


@dataclass(frozen=True)
class LossEvent:
    """A step of a run at which the objective switches, or the learning rate begins to decay."""

    run: str
    kind: Literal["switch", "decay"]
    step: float


def loss_points(run: str, metrics: Sequence[Mapping[str, Any]], base_steps: int) -> list[LossPoint]:
    """Return a run's training and validation losses. NaN and Inf are left out.

    Args:
        run: the run's name.
        metrics: the metrics of each batch, from `parse_metrics`.
        base_steps: steps of the model that the run continues.
    """
    points: list[LossPoint] = []
    width = max(math.ceil(len(metrics) / MAX_POINTS), MIN_BATCHES)
    for objective in _OBJECTIVES:
        windows: dict[int, list[tuple[int, float]]] = {}
        for entry in metrics:
            step, loss = base_steps + entry["batch"], entry.get(f"loss/train/{objective}")
            if loss is not None and math.isfinite(loss):
                windows.setdefault((entry["batch"] - 1) // width, []).append((step, loss))
        # The mean of a few batches would look like a jump at the end of the curve.
        last = max(windows, default=0)
        if last - 1 in windows and len(windows[last]) < width / 2:
            windows[last - 1] += windows.pop(last)
        for window in windows.values():
            interval = mean_interval([loss for _, loss in window])
            middle = sum(step for step, _ in window) / len(window)
            points.append(LossPoint(run, "training", objective, middle, interval.mean, interval.half, interval.count))
        for entry in metrics:
            step, loss = base_steps + entry["batch"], entry.get(f"metrics/{objective}/loss")
            if loss is not None and math.isfinite(loss):
                points.append(LossPoint(run, "validation", objective, step, loss, None, 1))
    return points


def loss_events(run: str, config: PretrainConfig, base_steps: int) -> list[LossEvent]:
    """Return the switches and the decay of a run. Those that are given in epochs are left out."""
    switches = [span.start for span in spans(config.objective.phases, config.max_duration)[1:]]
    decay = decay_start(config.schedule, config.max_duration)
    decays = [decay] if decay != config.max_duration else []

    def events(kind: Literal["switch", "decay"], times: list[Duration]) -> list[LossEvent]:
        steps = [config.batch_shape.batches(time) for time in times if time.unit != "ep"]
        return [LossEvent(run, kind, base_steps + step) for step in steps]

    return events("switch", switches) + events("decay", decays)


def draw_losses(points: Sequence[LossPoint], events: Iterable[LossEvent]) -> bytes | None:
    """Draw losses by steps as PNG, with a panel for each split and objective; None without losses.

    The band around a training loss is the 95% interval over the batches of a point. Diamonds are switches, and triangles
    are the starts of decays.
    """
    runs = {run: index for index, run in enumerate(sorted({point.run for point in points}))}
    panels = [
        (split, objective)
        for split in ("training", "validation")
        for objective in _OBJECTIVES
        if any((point.split, point.objective) == (split, objective) for point in points)
    ]
    if not panels:
        return None
    events, titles = list(events), [f"{objective.upper()}, {split}" for split, objective in panels]
    with default_style():
        figure, all_axes = make_panels(titles, columns=2, size=(6.8, 3.8))
        for panel, axes in zip(panels, all_axes, strict=True):
            for run, index in runs.items():
                curve = [point for point in points if point.run == run and (point.split, point.objective) == panel]
                if not curve:
                    continue
                style, steps = line_style(index), [point.step for point in curve]
                losses = [point.loss for point in curve]
                axes.plot(steps, losses, **style, label=plain(run), linewidth=1.2)
                low, high = ([p.loss + sign * (p.half or 0.0) for p in curve] for sign in (-1, 1))
                axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
                for event in events:
                    if event.run == run and (marked := _point_at(curve, event.step)) is not None:
                        axes.plot([event.step], [marked.loss], _MARKERS[event.kind], color=style["color"], markersize=5)
            axes.set_xlabel("pretraining steps")
            axes.set_ylabel("loss (nats per predicted token)")
        return png(figure)


def losses_csv(points: Sequence[LossPoint], events: Sequence[LossEvent]) -> bytes:
    """Return the drawn losses; a `switch` or `decay` has a line of its own, with a step and no loss."""
    rows: list[list[object]] = [
        [p.run, p.split, p.objective, p.step, p.loss, p.half, p.batches]
        for p in sorted(points, key=lambda p: (p.run, p.split, p.objective, p.step))
    ]
    rows += [[event.run, event.kind, None, event.step, None, None, None] for event in events]
    return csv_table("run kind objective step loss half_width batches", rows)


def _point_at(curve: Sequence[LossPoint], step: float) -> LossPoint | None:
    """Return the curve's point nearest to a step; None if the curve ends before it or starts far after it."""
    nearest = min(curve, key=lambda point: abs(point.step - step))
    length = max(curve[-1].step - curve[0].step, 1.0)
    return nearest if abs(nearest.step - step) <= max(length / 10, 1.0) else None
