"""Read the metrics that a run writes as JSON lines. Imports neither torch nor Composer."""

from __future__ import annotations

import json
from typing import Any


def parse_metrics(text: str) -> list[dict[str, Any]]:
    """Return the metrics of each batch, in order, from the last attempt that trained it. An incomplete line is skipped.

    Args:
        text: the content of a run's `metrics.jsonl`.
    """
    batches: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        # A validation line is merged into its batch's line and keeps that line's time. A batch trained again replaces both.
        previous = {} if "loss/train/total" in entry else batches.get(entry["batch"], {})
        batches[entry["batch"]] = {**previous, **entry, "time": previous.get("time", entry["time"])}
    return [batches[batch] for batch in sorted(batches)]
