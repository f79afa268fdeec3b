"""Pictures of a run's metrics."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

COLORS = {"clm": "#1f6f8b", "mlm": "#c8553d"}


def loss_curve(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation losses over tokens, with each switch of objective marked.

    Args:
        metrics: of each batch, as `biphasic.training.jsonl_logger.read_metrics` gives them.
        path: the PNG to write.
        title: above the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120)
    for name, color in COLORS.items():
        trained = [(entry["tokens"], entry[f"loss/train/{name}"]) for entry in metrics if f"loss/train/{name}" in entry]
        if trained:
            axes.plot(*zip(*trained, strict=True), color=color, alpha=0.35, linewidth=0.8)
            axes.plot(
                *zip(*_smooth(trained), strict=True), color=color, linewidth=1.8, label=f"{name.upper()}, training"
            )
        found = [(e["tokens"], e[f"metrics/{name}/loss"]) for e in metrics if f"metrics/{name}/loss" in e]
        if found:
            style = {"marker": "o", "markersize": 4, "linestyle": ":"}
            axes.plot(*zip(*found, strict=True), color=color, label=f"{name.upper()}, validation", **style)
    phases = [(entry["tokens"], entry["objective/phase"]) for entry in metrics if "objective/phase" in entry]
    for (at, before), (_, after) in pairwise(phases):
        if before != after:
            axes.axvline(at, color="black", linestyle="--", linewidth=1)
            axes.annotate(
                "switch", (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
            )
    axes.set(xlabel="tokens", ylabel="loss (nats per predicted token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smooth(points: list[tuple[float, float]], window: int = 10) -> list[tuple[float, float]]:
    """The mean of each point and those up to `window - 1` before it."""
    means = []
    for index, (at, _) in enumerate(points):
        last = [value for _, value in points[max(0, index - window + 1) : index + 1]]
        means.append((at, sum(last) / len(last)))
    return means
