"""Scores as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = ("task", "split", "documents", "queries", "system", "NDCG@10", "95% interval", "MRR@10", "Recall@100")


def table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table that a terminal shows straight, too.

    Args:
        records: `system`, and `scores` as `biphasic.evaluation.scoring.Scores` has them. A main score that isn't NDCG@10
            stands with its name.
    """
    rows = [_HEAD, *(_row(record["system"], one) for record in records for one in record["scores"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    right = {2, 3, 5, 6, 7, 8}
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if at in right else "-") for at, width in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]


def _row(system: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    split = one["split"] if one["subset"] == "default" else f"{one['subset']}, {one['split']}"
    retrieval = one["ndcg_at_10"] is not None
    main = _share(one["ndcg_at_10"]) if retrieval else f"{one['metric']} {_share(one['value'])}"
    low_high = "" if one["interval"] is None else f"{one['interval'][0]:.4f} to {one['interval'][1]:.4f}"
    counts = [f"{one[name]:,}" if one[name] is not None else "" for name in ("documents", "queries")]
    return (one["task"], split, *counts, system, main, low_high, _share(one["mrr_at_10"]), _share(one["recall_at_100"]))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
