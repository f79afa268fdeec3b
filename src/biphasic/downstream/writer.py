"""The schemas of downstream datasets, and the writer of a task's folder."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from biphasic.config.base import flatten
from biphasic.config.tasks import DatasetConfig, TasksConfig
from biphasic.downstream.tables import InvalidRow, Rows, Table, UnusedRow, open_table
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.storage import join, open_store

TASK_RECORD = "task.json"
STARTED = "task.started"
"""Written before the first table and removed after the record. Only tables beside this file may be removed."""
_TEXT, _TEXTS = pa.string(), pa.list_(pa.string())
_ANSWERS = pa.struct({"text": _TEXTS, "answer_start": pa.list_(pa.int32())})
_PAIRS = {"query": _TEXT, "positive": _TEXT, "negatives": _TEXTS}
SCHEMAS = {
    "classification": pa.schema({"id": _TEXT, "text": _TEXT, "text_pair": _TEXT, "label": pa.int32()}),
    "regression": pa.schema({"id": _TEXT, "text": _TEXT, "text_pair": _TEXT, "label": pa.float32()}),
    "multi_label": pa.schema({"id": _TEXT, "text": _TEXT, "text_pair": _TEXT, "labels": pa.list_(pa.int32())}),
    "tokens": pa.schema({"id": _TEXT, "tokens": _TEXTS, "labels": pa.list_(pa.int32())}),
    "question_answering": pa.schema({"id": _TEXT, "question": _TEXT, "context": _TEXT, "answers": _ANSWERS}),
    "pairs": pa.schema(_PAIRS),
    "scored_pairs": pa.schema({**_PAIRS, "scores": pa.list_(pa.float32())}),
    "corpus": pa.schema({"_id": _TEXT, "title": _TEXT, "text": _TEXT}),
    "queries": pa.schema({"_id": _TEXT, "text": _TEXT}),
    "qrels": pa.schema({"query-id": _TEXT, "corpus-id": _TEXT, "score": pa.int32()}),
}


class TaskWriter:
    """Writes one task's folder: each file atomically, and the record last."""

    def __init__(self, name: str, config: TasksConfig):
        self.name, self.config = name, config
        self.store = open_store(join(config.output, name))
        self.store.remove_unfinished()
        self.scratch: Path = self.store.scratch()
        self.label_names: list[str] | None = None
        self.notes: list[str] = []
        self.record: dict[str, Any] = {"rows": {}, "left_out": {}, "not_used": {}, "warnings": [], "commits": {}}
        """Number of rows by file name, without `.parquet`; numbers of invalid and unused rows by file name and reason;
        warnings; and commits by the source's path."""
        self._contents: dict[str, set[int]] = {}
        """Hashes of the examples, without their ids, by file name."""

    def table(self, config: DatasetConfig, split: str, columns: list[str]) -> Table:
        """Open a table, and keep its commit for the record."""
        settings = [*flatten(self.config.tasks[self.name]), *flatten(config)]  # a retrieval set's tables have their own
        keys = {value: key for key, value in settings if "column" in key}
        table = open_table(config, split, columns, keys)
        self.record["commits"][config.path or ", ".join((config.files or {})[split])] = table.commit
        return table

    def write(self, name: str, schema: str, rows: Rows, total: int) -> None:
        """Write `name`.parquet. Invalid rows are left out and counted.

        Raises a UserError if more than a share of `max_invalid_share` of the `total` rows is invalid, or no row is
        left.
        """
        file = self.scratch / "file.parquet"
        left_out, not_used = Counter[str](), Counter[str]()
        first_fault, count, contents, answered = "", 0, set[int](), False
        with pq.ParquetWriter(file, SCHEMAS[schema], compression="zstd") as writer:
            for group in groups_up_to(1000, rows):
                valid = [row for row in group if isinstance(row, dict)]
                not_used.update(row.args[0] for row in group if isinstance(row, UnusedRow))
                for fault, place in (row.args for row in group if isinstance(row, InvalidRow)):
                    left_out[fault] += 1
                    first_fault = first_fault or f"{place}: {fault}"
                if left_out.total() > (share := self.config.max_invalid_share) * total:
                    problem = f"{left_out.total():,} of {total:,} rows can't be used"
                    limit = f"max_invalid_share allows {share:.2%}"
                    raise UserError(f"{self.name}: {name}: {problem}, and {limit}; the first: {first_fault}")
                for row in valid:
                    if "id" in row:  # rows of retrieval sets have none
                        content = json.dumps([row[name] for name in row if name != "id"])
                        contents.add(xxhash.xxh3_64_intdigest(content.encode()))
                answered = answered or any(row["answers"]["text"] for row in valid if "answers" in row)
                writer.write_table(pa.Table.from_pylist(valid, SCHEMAS[schema]))
                count += len(valid)
        if not count:
            raise UserError(f"{self.name}: {name}: there are no rows")
        if not self.record["rows"]:
            self.store.write(STARTED, b"`biphasic tasks` may remove the tables beside this file\n")
        self.store.move(file, f"{name}.parquet")
        self.record["rows"][name] = count
        for key, counts in (("left_out", left_out), ("not_used", not_used)):
            if counts:
                self.record[key][name] = dict(sorted(counts.items()))
        for other, others in self._contents.items():
            (part, smaller), (whole, _) = sorted([(name, contents), (other, others)], key=lambda split: len(split[1]))
            share = len(contents & others) / max(len(smaller), 1)
            if share > 0.5:  # published sets repeat a few percent
                warning = f"{share:.0%} of {part} also occurs in {whole}: scores don't measure generalization"
                self.record["warnings"].append(warning)
        self._contents[name] = contents
        if schema == "question_answering" and not answered:
            warning = f"no question of {name} has an answer: a model that never answers scores 1"
            self.record["warnings"].append(warning)
