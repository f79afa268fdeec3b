"""Divide the quickstart's training pairs into fewer training pairs and a validation set, to choose a fine-tuning rate on.

Reads runs/quickstart/text/pairs/train.parquet and writes a retrieval set into runs/quickstart/rates/pairs. The test pairs
are not read. Then: python src/main.py recipes/quickstart/rates.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from biphasic.downstream.writer import TASK_RECORD
from biphasic.storage import json_bytes, open_store

PAIRS = Path("runs/quickstart/text/pairs/train.parquet")
OUTPUT = Path("runs/quickstart/rates/pairs")
ONE_IN = 18
"""One training pair in so many is a validation pair, chosen by its id, which is a hash: about 1,000."""


def write_validation_set(pairs: Path, output: Path) -> dict[str, int]:
    """Write `train`, and the validation pairs as `corpus`, `queries` and `qrels/validation`. Returns the numbers of rows."""
    rows = pq.read_table(pairs).to_pylist()
    chosen = [int(row["id"][:8], 16) % ONE_IN == 0 for row in rows]
    held = [row for row, held_out in zip(rows, chosen, strict=True) if held_out]
    tables: dict[str, pa.Table] = {
        "train": pq.read_table(pairs).filter(pa.array([not held_out for held_out in chosen])),
        "corpus": pa.table({"_id": _column(held, "id"), "title": [""] * len(held), "text": _column(held, "positive")}),
        "queries": pa.table({"_id": _column(held, "id"), "text": _column(held, "query")}),
        "qrels/validation": pa.table(
            {"query-id": _column(held, "id"), "corpus-id": _column(held, "id"), "score": [1] * len(held)}
        ),
    }
    for name, table in tables.items():
        file = output / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, file)
    counts = {name: table.num_rows for name, table in tables.items()}
    record: dict[str, Any] = {"task": "docstrings", "kind": "retrieval", "license": "of the packages", "rows": counts}
    open_store(str(output)).write(TASK_RECORD, json_bytes(record))
    return counts


def _column(rows: list[dict[str, Any]], name: str) -> list[str]:
    return [row[name] for row in rows]


if __name__ == "__main__":
    print(f"{OUTPUT}: {write_validation_set(PAIRS, OUTPUT)}")
