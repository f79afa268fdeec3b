"""Format an evaluation's scores as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("task", "split", "documents", "queries", "system", "NDCG@10", "95% interval", "MRR@10", "Recall@100")
_LEFT_ALIGNED = ("task", "split", "system")


def score_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are also aligned in a terminal.

    Args:
        records: dicts with `system` and `scores` (fields of `biphasic.evaluation.scoring.SplitScores`). A main score other
            than NDCG@10 is shown with its name.
    """
    rows = [_COLUMNS, *(_row(record["system"], scores) for record in records for scores in record["scores"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [(width, "<" if name in _LEFT_ALIGNED else ">") for name, width in zip(_COLUMNS, widths, strict=True)]
    template = "| " + " | ".join(f"{{:{side}{width}}}" for width, side in columns) + " |"
    lines = [template.format(*row) for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if side == "<" else ":") for width, side in columns) + "|"
    return [lines[0], rule, *lines[1:]]


def _row(system: str, scores: Mapping[str, Any]) -> tuple[str, ...]:
    split = scores["split"] if scores["subset"] == "default" else f"{scores['subset']}, {scores['split']}"
    counts = ("" if scores[name] is None else f"{scores[name]:,}" for name in ("documents", "queries"))
    is_retrieval = scores["ndcg_at_10"] is not None
    main = _format(scores["ndcg_at_10"]) if is_retrieval else f"{scores['metric']} {_format(scores['value'])}"
    interval = " to ".join(map(_format, scores["interval"] or ()))
    others = (_format(scores[name]) for name in ("mrr_at_10", "recall_at_100"))
    return (scores["task"], split, *counts, system, main, interval, *others)


def _format(score: float | None) -> str:
    return "" if score is None else f"{score:.4f}"
