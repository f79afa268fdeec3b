"""Write downstream datasets in the four schemas that fine-tuning and evaluation read, one folder for each task.

    classification       <split>.parquet: id, text, text_pair (null where there is none), label
    tokens               <split>.parquet: id, tokens, labels (as long as tokens)
    question_answering   <split>.parquet: id, question, context, answers {text, answer_start} (empty: none)
    retrieval            train.parquet: query, positive, negatives; and in BEIR's layout corpus.parquet: _id, title, text;
                         queries.parquet: _id, text; qrels/<split>.parquet: query-id, corpus-id, score

Texts are stored unchanged; fine-tuning adds the prompts (`Premise: …`). `task.json` is written last, so a folder without
it is incomplete; until then, `task.started` says that the tables are this program's. The same sources and YAML give the
same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

from biphasic.config.tasks import (
    ClassificationSet,
    QuestionAnsweringSet,
    RetrievalSet,
    SupervisedSet,
    TasksConfig,
    TokensSet,
)
from biphasic.downstream import examples
from biphasic.downstream.beir import corpus, pairs, qrels, queries
from biphasic.downstream.formats import as_bio
from biphasic.downstream.tables import InvalidRow, Table, TableRow, UnusedRow
from biphasic.downstream.writer import STARTED, TASK_RECORD, Rows, TaskWriter
from biphasic.errors import UserError
from biphasic.storage import first_line, join, json_bytes, open_store


def prepare_task(name: str, config: TasksConfig) -> dict[str, Any]:
    """Write one task's tables and its record, unless the task is already finished.

    Returns:
        The task's record, the content of `task.json`.

    Raises:
        UserError: a source can't be read or doesn't match the YAML, or the folder holds something else.
    """
    task, path, settings = config.tasks[name], join(config.output, name), _settings(config, name)
    try:
        if (record := _finished_record(path, settings)) is not None:
            return record
        writer = TaskWriter(name, config)
        try:
            writer.store.remove(file for file in writer.store.list() if file.endswith(".parquet"))
            WRITERS[task.kind](writer, task)
            record = {
                "task": name,
                "kind": task.kind,
                "license": task.license,
                "homepage": task.homepage,
                "label_names": writer.label_names,
                "rows": writer.rows,
                "left_out": writer.left_out,
                "not_used": writer.not_used,
                "warnings": writer.warnings,
                "commits": writer.commits,
                "settings": settings,
            }
            writer.store.write(TASK_RECORD, json_bytes(record))
            writer.store.remove([STARTED])
        finally:
            shutil.rmtree(writer.scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{name}: {path} can't be written ({first_line(error)})") from error
    return record


def is_finished(name: str, config: TasksConfig) -> bool:
    """Return whether the output holds the task as this YAML describes it."""
    return _finished_record(join(config.output, name), _settings(config, name)) is not None


def _finished_record(path: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    store = open_store(path)
    files = store.list()
    if TASK_RECORD not in files:
        # An interrupted run leaves tables beside its marker; any other file means that the folder is not a task's.
        tables = [name for name in files if STARTED in files and name.endswith(".parquet")]
        if others := files.keys() - {STARTED, *tables}:
            raise UserError(f"{path} holds something else ({min(others)}); choose another output")
        return None
    try:
        record = json.loads(store.read(TASK_RECORD))
        recorded = record["settings"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path}/{TASK_RECORD} is no record of a task; choose another output") from None
    if recorded != settings:
        keys = ", ".join(sorted(key for key in {*recorded, *settings} if recorded.get(key) != settings.get(key)))
        raise UserError(f"{path} was made with other settings ({keys} differ): remove it, or choose another output")
    return record


def _settings(config: TasksConfig, name: str) -> dict[str, Any]:
    shared = config.model_dump(mode="json", exclude={"output", "tasks"})
    return {**config.tasks[name].model_dump(mode="json"), **shared}


def _write_splits(
    writer: TaskWriter,
    task: SupervisedSet,
    columns: dict[str, str | None],
    make: Callable[..., TableRow],
    label_column: str | None = None,
) -> None:
    """Write each split. If `validation` is missing, it is taken from `train`.

    `make` gets the values by the schema's names (None for those without a column), and a function that maps a label in
    `label_column` to its number.
    """
    for name, split in task.splits.items():
        table = writer.table(task.source, split, examples.supervised(task))
        number_of = None if label_column is None else _label_numbers(writer, table, label_column, task)
        tables = {name: table}
        if name == "train" and "validation" not in task.splits:
            train, validation = table.divide(1 - writer.config.validation_fraction, writer.config.seed)
            tables = {"validation": validation, "train": train}
        for output, part in tables.items():
            rows = _rows(part, columns, task.id_column, split, partial(make, number_of=number_of))
            writer.write(output, task.kind, rows, len(part))


def _rows(
    table: Table,
    columns: dict[str, str | None],
    id_column: str | None,
    split: str,
    make: Callable[[TableRow], TableRow],
) -> Rows:
    used = {name: column for name, column in columns.items() if column is not None}
    to_read: list[str] = list(dict.fromkeys([*used.values(), *filter(None, [id_column])]))
    number = 0
    for batch in table.batches(to_read):
        for values in zip(*(batch[column] for column in to_read), strict=True):
            row = dict(zip(to_read, values, strict=True))
            id = f"{split}-{number}" if id_column is None else str(row[id_column])
            number += 1
            try:
                yield {"id": id, **make({name: row[used[name]] if name in used else None for name in columns})}
            except InvalidRow as error:
                yield InvalidRow(error.args[0], f"{table.source}, row {number}")


def _require_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRow(f"its {name} is no text")
    return value


def _label_numbers(writer: TaskWriter, table: Table, column: str, task: Any) -> Callable[[Any], int]:
    """Return a function that maps a label (number or name) to its number, and keep the names for the record."""
    names, dataset_names = task.label_names, table.label_names(column)
    if names is not None and dataset_names is not None and names != dataset_names:
        given, expected = ", ".join(names), ", ".join(dataset_names)
        raise UserError(f"{table.source}: label_names are {given}, but the dataset says {expected}")
    writer.label_names = names or dataset_names or table.found_labels.get(column)
    if writer.label_names is None:
        advice = "give label_names, in the order of their numbers"
        raise UserError(f"{table.source}: the dataset doesn't name its labels: {advice}")
    numbers = {name: number for number, name in enumerate(writer.label_names)}

    def number_of(label: Any) -> int:
        number = numbers.get(label) if isinstance(label, str) else label
        if not isinstance(number, int) or not 0 <= number < len(numbers):
            raise InvalidRow(f"its label {label!r} is none of {len(numbers)}")
        return number

    return number_of


def _write_classification(writer: TaskWriter, task: ClassificationSet) -> None:
    columns = {"text": task.text_column, "text_pair": task.text_pair_column, "label": task.label_column}

    def make(values: TableRow, number_of: Callable[[Any], int]) -> TableRow:
        pair = None if task.text_pair_column is None else _require_text(values["text_pair"], "second text")
        text = _require_text(values["text"], "text")
        return {"text": text, "text_pair": pair, "label": number_of(values["label"])}

    _write_splits(writer, task, columns, make, task.label_column)


def _write_tokens(writer: TaskWriter, task: TokensSet) -> None:
    columns: dict[str, str | None] = {"tokens": task.tokens_column, "labels": task.labels_column}

    def make(values: TableRow, number_of: Callable[[Any], int]) -> TableRow:
        labels = values["labels"] or []
        if labels and all(isinstance(label, str) for label in labels):
            labels = as_bio(labels)
        tokens, numbers = values["tokens"] or [], [number_of(label) for label in labels]
        if not tokens:
            raise InvalidRow("it has no tokens")
        if len(tokens) != len(numbers):
            raise InvalidRow("it has another number of labels than of tokens")
        names = writer.label_names or []
        _require_bio([names[number] for number in numbers])
        return {"tokens": [_require_text(token, "token") for token in tokens], "labels": numbers}

    _write_splits(writer, task, columns, make, task.labels_column)


def _require_bio(names: list[str]) -> None:
    """Refuse an inside tag that does not follow a tag of its type.

    Such a tag means that the names are in the wrong order, or that the tags are not BIO.
    """
    for before, name in zip(["O", *names], names, strict=False):
        if name.startswith("I-") and before[2:] != name[2:]:
            raise InvalidRow(f"{name} follows {before}")


def _write_question_answering(writer: TaskWriter, task: QuestionAnsweringSet) -> None:
    columns = {"question": task.question_column, "context": task.context_column, "answers": "answers"}

    def make(values: TableRow, number_of: None) -> TableRow:
        question, context = (_require_text(values[name], name) for name in ("question", "context"))
        return {"question": question, "context": context, "answers": _answers(values["answers"], context)}

    _write_splits(writer, task, dict(columns), make)


def _answers(answers: Any, context: str) -> TableRow:
    """Return answers in SQuAD's form, given in this form or as texts. Each must be at its position in the context."""
    if isinstance(answers, dict) and answers.keys() >= {"text", "answer_start"}:
        texts, starts = list(answers["text"]), list(answers["answer_start"])
    elif isinstance(answers, list) and all(isinstance(text, str) for text in answers):
        texts = list(dict.fromkeys(answers))
        starts = [context.find(text) for text in texts]
    else:
        raise InvalidRow("its answers are neither {text, answer_start} nor texts")
    if len(texts) != len(starts):
        raise InvalidRow("it has another number of answers than of their places")
    for text, start in zip(texts, starts, strict=True):
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise InvalidRow("an answer doesn't stand in its place in the context")
    return {"text": texts, "answer_start": starts}


def _write_retrieval(writer: TaskWriter, task: RetrievalSet) -> None:
    if task.train is not None:
        table = writer.table(task.train, task.train.split, examples.pairs(task.train))
        writer.write("train", "pairs", pairs(task.train, table), len(table))
    judged_documents: set[str] = set()
    judged_queries: set[str] = set()
    relevant_queries: set[str] = set()
    relevant: dict[str, list[TableRow | InvalidRow | UnusedRow]] = {}
    for split, config in task.qrels.items():
        relevant[split] = []
        table = writer.table(config, config.split, examples.qrels(config))
        for row in qrels(config, table, writer.config.seed):
            if isinstance(row, dict):
                judged_documents.add(row["corpus-id"])
                judged_queries.add(row["query-id"])
                if row["score"] >= task.min_score:
                    relevant_queries.add(row["query-id"])
                else:
                    row = UnusedRow(f"its score is below min_score ({task.min_score})")
            relevant[split].append(row)
    query_ids: set[str] = set()
    corpus_ids: set[str] = set()
    tables = [(config, writer.table(config, config.split, examples.queries(config))) for config in task.queries]
    rows = (
        row for config, table in tables for row in queries(config, table, relevant_queries, judged_queries, query_ids)
    )
    writer.write("queries", "queries", rows, sum(len(table) for _, table in tables))
    table = writer.table(task.corpus, task.corpus.split, examples.corpus(task.corpus))
    documents = corpus(task.corpus, table, judged_documents if task.judged_only else None, corpus_ids)
    writer.write("corpus", "corpus", documents, len(table))
    for split, judgments in relevant.items():
        used = sum(not isinstance(row, UnusedRow) for row in judgments)
        writer.write(f"qrels/{split}", "qrels", _known(judgments, query_ids, corpus_ids, split), used)


def _known(
    judgments: list[TableRow | InvalidRow | UnusedRow], query_ids: set[str], corpus_ids: set[str], split: str
) -> Rows:
    for number, row in enumerate(judgments, start=1):
        if not isinstance(row, dict):
            yield row
        elif row["query-id"] not in query_ids:
            yield InvalidRow("its query is not among the queries", f"qrels of {split}, number {number}")
        elif row["corpus-id"] not in corpus_ids:
            yield InvalidRow("its document is not in the corpus", f"qrels of {split}, number {number}")
        else:
            yield row


WRITERS: dict[str, Callable[[TaskWriter, Any], None]] = {
    "classification": _write_classification,
    "tokens": _write_tokens,
    "question_answering": _write_question_answering,
    "retrieval": _write_retrieval,
}
