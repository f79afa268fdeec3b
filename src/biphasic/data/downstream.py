"""Downstream datasets in the four schemas that fine-tuning and evaluation read, one folder a task.

    classification       <split>.parquet: id, text, text_pair (null where there is none), label
    tokens               <split>.parquet: id, tokens, labels (as long as tokens)
    question_answering   <split>.parquet: id, question, context, answers {text, answer_start} (empty: none)
    retrieval            train.parquet: query, positive, negatives; and as BEIR has them corpus.parquet: _id, title, text;
                         queries.parquet: _id, text; qrels/<split>.parquet: query-id, corpus-id, score

Texts are stored as the dataset has them; what goes around them (`Premise: …`) is fine-tuning's. Beside the files lies
`task.json`, written last: a folder without one is not whole. The same sources and YAML give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from biphasic.config.errors import UserError
from biphasic.config.tasks import (
    ClassificationTask,
    QuestionAnsweringTask,
    RetrievalData,
    SplitTask,
    TasksConfig,
    TokensTask,
)
from biphasic.data.beir import corpus, pairs, qrels, queries
from biphasic.data.tables import BadRow, Row, Table, open_table
from biphasic.storage import Store, as_bytes, join, short, store

RECORD = "task.json"
_TEXTS = pa.list_(pa.string())
SCHEMAS = {
    "classification": pa.schema(
        {"id": pa.string(), "text": pa.string(), "text_pair": pa.string(), "label": pa.int32()}
    ),
    "tokens": pa.schema({"id": pa.string(), "tokens": _TEXTS, "labels": pa.list_(pa.int32())}),
    "question_answering": pa.schema(
        {
            "id": pa.string(),
            "question": pa.string(),
            "context": pa.string(),
            "answers": pa.struct({"text": _TEXTS, "answer_start": pa.list_(pa.int32())}),
        }
    ),
    "pairs": pa.schema({"query": pa.string(), "positive": pa.string(), "negatives": _TEXTS}),
    "corpus": pa.schema({"_id": pa.string(), "title": pa.string(), "text": pa.string()}),
    "queries": pa.schema({"_id": pa.string(), "text": pa.string()}),
    "qrels": pa.schema({"query-id": pa.string(), "corpus-id": pa.string(), "score": pa.int32()}),
}


@dataclass
class Written:
    """What a task's folder holds."""

    rows: dict[str, int] = field(default_factory=dict)
    """By file, without `.parquet`."""
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """By file: how many rows for which reason."""
    label_names: list[str] | None = None
    commits: dict[str, str | None] = field(default_factory=dict)
    """By the source's path: the hub's commit that was read."""


class _Folder:
    """A task's folder while it is made: files come whole or not at all, the record last."""

    def __init__(self, output: str, name: str, config: TasksConfig):
        self.place = join(output, name)
        self.name, self.config = name, config
        self.store: Store = store(self.place)
        self.written = Written()
        self._scratch: Path = self.store.scratch()

    def table(self, config: Any, split: str) -> Table:
        """Open a table, and remember what was read."""
        table = open_table(config, split)
        self.written.commits[config.path or ", ".join(config.files[split])] = table.commit
        return table

    def write(self, name: str, schema: str, rows: Iterable[Row | BadRow], total: int) -> None:
        """Make `name`.parquet of rows; those that are faults are counted.

        Raises:
            UserError: more than `most_left_out` of `total` rows are faulty, or none is left.
        """
        file = self._scratch / "file.parquet"
        bad: Counter[str] = Counter()
        first, count = "", 0
        with pq.ParquetWriter(file, SCHEMAS[schema], compression="zstd") as writer:
            for batch in _in_batches(rows):
                good = [row for row in batch if not isinstance(row, BadRow)]
                for row in batch:
                    if isinstance(row, BadRow):
                        kind, where = row.args
                        bad[kind] += 1
                        first = first or f"{where}: {kind}"
                if bad.total() > self.config.most_left_out * total:
                    most = f"most_left_out allows {self.config.most_left_out:.2%}"
                    raise UserError(f"{self.name}: {name}: {bad.total():,} of {total:,} rows can't be used, and {most}; "
                                    f"the first: {first}")  # fmt: skip
                writer.write_table(pa.Table.from_pylist(good, SCHEMAS[schema]))
                count += len(good)
        if not count:
            raise UserError(f"{self.name}: {name}: there are no rows")
        self.store.take(file, f"{name}.parquet")
        self.written.rows[name] = count
        if bad:
            self.written.left_out[name] = dict(sorted(bad.items()))

    def finish(self, content: dict[str, Any]) -> None:
        """Write the record."""
        self.store.write(RECORD, as_bytes(content))

    def close(self) -> None:
        """Remove what is not needed any more."""
        shutil.rmtree(self._scratch, ignore_errors=True)


def convert_task(name: str, config: TasksConfig) -> dict[str, Any]:
    """Bring one task into its schema, unless it is there already.

    Returns:
        Its record: `task.json`.

    Raises:
        UserError: a source can't be read, isn't what the YAML says, or the folder holds something else.
    """
    task, place, settings = config.tasks[name], join(config.output, name), _settings(config, name)
    try:
        if (found := _finished(place, settings)) is not None:
            return found
        folder = _Folder(config.output, name, config)
        try:
            _RECIPES[task.kind](folder, task)
            written = folder.written
            record = {
                "task": name,
                "kind": task.kind,
                "license": task.license,
                "homepage": task.homepage,
                "label_names": written.label_names,
                "rows": written.rows,
                "left_out": written.left_out,
                "commits": written.commits,
                "settings": settings,
            }
            folder.finish(record)
        finally:
            folder.close()
    except OSError as error:
        raise UserError(f"{name}: {place} can't be written ({short(error)})") from error
    return record


def is_finished(name: str, config: TasksConfig) -> bool:
    """Whether the task lies in the output already, as this YAML makes it."""
    return _finished(join(config.output, name), _settings(config, name)) is not None


def _finished(place: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    files = store(place)
    there = files.list()
    if RECORD not in there:
        # A run that was stopped leaves files of these names; anything else isn't ours to write beside.
        if others := [name for name in there if not name.endswith(".parquet")]:
            raise UserError(f"{place} holds something else ({others[0]}); choose another output")
        files.remove(there)
        return None
    try:
        record = json.loads(files.read(RECORD))
        theirs = record["settings"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{place}/{RECORD} is no record of a task; choose another output") from None
    if theirs != settings:
        keys = sorted(key for key in {*theirs, *settings} if theirs.get(key) != settings.get(key))
        raise UserError(
            f"{place} was made with other settings ({', '.join(keys)} differ): remove it, or choose another output"
        )
    return record


def _settings(config: TasksConfig, name: str) -> dict[str, Any]:
    shared = config.model_dump(mode="json", exclude={"output", "tasks"})
    return {**config.tasks[name].model_dump(mode="json"), **shared}


def _in_batches(rows: Iterable[Row | BadRow], size: int = 1000) -> Iterator[list[Row | BadRow]]:
    batch: list[Row | BadRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _splits(folder: _Folder, task: SplitTask) -> Iterator[tuple[str, str, Table]]:
    """Each split to write, the source's name for it, and its rows; `validation` out of `train` where there is none."""
    for name, split in task.splits.items():
        table = folder.table(task.source, split)
        if name == "train" and "validation" not in task.splits:
            config = folder.config
            table, held_out = table.halves(1 - config.validation_fraction, config.seed)
            yield "validation", split, held_out
        yield name, split, table


def _each(
    table: Table, columns: dict[str, str | None], id_column: str | None, split: str, make: Callable[[Row], Row]
) -> Iterator[Row | BadRow]:
    """Rows of a split: `make` gets the values by our names; those without a column are None."""
    used = {ours: theirs for ours, theirs in columns.items() if theirs is not None}
    names = list(dict.fromkeys(used.values()))
    if id_column is not None and id_column not in names:
        names.append(id_column)
    number = 0
    for batch in table.batches(names):
        for at in range(len(batch[names[0]])):
            id = f"{split}-{number}" if id_column is None else str(batch[id_column][at])
            number += 1
            values = {ours: batch[used[ours]][at] if ours in used else None for ours in columns}
            try:
                yield {"id": id, **make(values)}
            except BadRow as bad:
                yield BadRow(bad.args[0], f"{table.where}, row {number}")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"its {what} is no text")
    return value


class _Labels:
    """A column's labels as numbers.

    Args:
        given: names in the YAML, in the order of the numbers.
        named: names in the dataset.
        where: for messages.
    """

    def __init__(self, given: list[str] | None, named: list[str] | None, where: str):
        if given is not None and named is not None and given != named:
            raise UserError(f"{where}: label_names are {', '.join(given)}, but the dataset says {', '.join(named)}")
        self.names = given or named
        if self.names is None:
            raise UserError(
                f"{where}: the dataset doesn't name its labels: give label_names, in the order of their numbers"
            )
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, value: Any) -> int:
        """Of a number or a name."""
        found = self._numbers.get(value) if isinstance(value, str) else value
        if not isinstance(found, int) or not 0 <= found < len(self._numbers):
            raise BadRow(f"its label {value!r} is none of {len(self._numbers)}")
        return found


def _classification(folder: _Folder, task: ClassificationTask) -> None:
    for name, split, table in _splits(folder, task):
        labels = _Labels(task.label_names, table.label_names(task.label_column), table.where)
        folder.written.label_names = labels.names
        columns = {"text": task.text_column, "text_pair": task.text_pair_column, "label": task.label_column}

        def make(values: Row, labels: _Labels = labels) -> Row:
            pair = values["text_pair"]
            return {
                "text": _text(values["text"], "text"),
                "text_pair": None if task.text_pair_column is None else _text(pair, "second text"),
                "label": labels.number(values["label"]),
            }

        folder.write(name, "classification", _each(table, columns, task.id_column, split, make), len(table))


def _tokens(folder: _Folder, task: TokensTask) -> None:
    for name, split, table in _splits(folder, task):
        labels = _Labels(task.label_names, table.label_names(task.labels_column), table.where)
        folder.written.label_names = labels.names
        columns: dict[str, str | None] = {"tokens": task.tokens_column, "labels": task.labels_column}

        def make(values: Row, labels: _Labels = labels) -> Row:
            tokens, numbers = values["tokens"] or [], [labels.number(value) for value in values["labels"] or []]
            if not tokens:
                raise BadRow("it has no tokens")
            if len(tokens) != len(numbers):
                raise BadRow("it has another number of labels than of tokens")
            _require_bio([labels.names[number] for number in numbers])  # pyright: ignore[reportOptionalSubscript]
            return {"tokens": [_text(token, "token") for token in tokens], "labels": numbers}

        folder.write(name, "tokens", _each(table, columns, task.id_column, split, make), len(table))


def _require_bio(names: list[str]) -> None:
    """An inside follows a beginning or an inside of its own type: where it doesn't, the names are not in the numbers' order
    (or it is no BIO)."""
    for before, name in zip(["O", *names], names, strict=False):
        if name.startswith("I-") and before[2:] != name[2:]:
            raise BadRow(f"{name} follows {before}")


def _question_answering(folder: _Folder, task: QuestionAnsweringTask) -> None:
    columns: dict[str, str | None] = {
        "question": task.question_column,
        "context": task.context_column,
        "answers": task.answers_column,
    }

    def make(values: Row) -> Row:
        question, context = _text(values["question"], "question"), _text(values["context"], "context")
        return {"question": question, "context": context, "answers": _answers(values["answers"], context)}

    for name, split, table in _splits(folder, task):
        folder.write(name, "question_answering", _each(table, columns, task.id_column, split, make), len(table))


def _answers(given: Any, context: str) -> Row:
    """SQuAD's form, from it or from texts alone; each answer really stands where it says."""
    if isinstance(given, dict) and given.keys() >= {"text", "answer_start"}:
        texts, starts = list(given["text"]), list(given["answer_start"])
    elif isinstance(given, list) and all(isinstance(text, str) for text in given):
        texts = list(dict.fromkeys(given))
        starts = [context.find(text) for text in texts]
    else:
        raise BadRow("its answers are neither {text, answer_start} nor texts")
    if len(texts) != len(starts):
        raise BadRow("it has another number of answers than of their places")
    for text, start in zip(texts, starts, strict=True):
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise BadRow("an answer doesn't stand in its place in the context")
    return {"text": texts, "answer_start": starts}


def _retrieval(folder: _Folder, task: RetrievalData) -> None:
    if task.train is not None:
        table = folder.table(task.train, task.train.split)
        folder.write("train", "pairs", pairs(task.train, table), len(table))
    judged: set[str] = set()
    asked: set[str] = set()
    found: dict[str, list[Row]] = {}
    for split, config in task.qrels.items():
        all_rows = list(qrels(config, folder.table(config, config.split), folder.config.seed))
        judged.update(row["corpus-id"] for row in all_rows)
        found[split] = [row for row in all_rows if row["score"] >= task.min_score]
        asked.update(row["query-id"] for row in found[split])
    known: dict[str, set[str]] = {"corpus": set(), "queries": set()}
    tables = [(config, folder.table(config, config.split)) for config in task.queries]
    total = sum(len(table) for _, table in tables)
    rows = (row for config, table in tables for row in queries(config, table, asked, known["queries"]))
    folder.write("queries", "queries", rows, total)
    table = folder.table(task.corpus, task.corpus.split)
    wanted = judged if task.judged_only else None
    folder.write("corpus", "corpus", corpus(task.corpus, table, wanted, known["corpus"]), len(table))
    for split, rows in found.items():
        folder.write(f"qrels/{split}", "qrels", _known(rows, known, split), len(rows))


def _known(rows: list[Row], known: dict[str, set[str]], split: str) -> Iterator[Row | BadRow]:
    for number, row in enumerate(rows):
        where = f"qrels of {split}, number {number + 1}"
        if row["query-id"] not in known["queries"]:
            yield BadRow("its query is not among the queries", where)
        elif row["corpus-id"] not in known["corpus"]:
            yield BadRow("its document is not in the corpus", where)
        else:
            yield row


_RECIPES: dict[str, Callable[[_Folder, Any], None]] = {
    "classification": _classification,
    "tokens": _tokens,
    "question_answering": _question_answering,
    "retrieval": _retrieval,
}
