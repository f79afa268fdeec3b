"""Plan and write downstream datasets in the schemas of `writer.py`, one folder for each task.

Texts are stored unchanged; fine-tuning adds the prompts (`Premise: …`). `task.json` is written last, so a folder without
it is incomplete; until then, `task.started` marks the tables as written by Biphasic.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from biphasic.config.plan import JobPlan
from biphasic.config.tasks import (
    ClassificationSet,
    DatasetConfig,
    QuestionAnsweringSet,
    RegressionSet,
    RetrievalSet,
    SupervisedSet,
    TasksConfig,
    TokensSet,
    source_datasets,
)
from biphasic.downstream.beir import write_retrieval
from biphasic.downstream.formats import as_bio
from biphasic.downstream.tables import (
    InvalidRow,
    Rows,
    Table,
    TableRow,
    file_patterns,
    labels_in_files,
    open_table,
    require_strings,
)
from biphasic.downstream.writer import STARTED, TASK_RECORD, TaskWriter
from biphasic.errors import UserError
from biphasic.storage import glob_pattern, join, json_bytes, open_store, user_errors
from biphasic.storage.hub import is_local_path, is_made_by_jobs

_ROWS = 100
"""Number of first rows of local data that a plan reads."""


def prepare_task(name: str, config: TasksConfig) -> dict[str, Any]:
    """Write one task's tables, unless the task is already finished, and return the content of its `task.json`.

    Raises:
        UserError: a source can't be read or doesn't match the YAML, or the folder holds something else.
    """
    task, path = config.tasks[name], join(config.output, name)
    with user_errors(f"{name}: {path} can't be written"):
        if (record := finished_record(name, config)) is not None:
            return record
        writer = TaskWriter(name, config)
        try:
            writer.store.remove(file for file in writer.store.list() if file.endswith(".parquet"))
            WRITERS[task.kind](writer, task)
            about = {"task": name, **task.model_dump(include={"kind", "license", "homepage"})}
            record = {**about, "label_names": writer.label_names, **writer.record, "settings": _settings(config, name)}
            writer.store.write(TASK_RECORD, json_bytes(record))
            writer.store.remove([STARTED])
        finally:
            shutil.rmtree(writer.scratch, ignore_errors=True)
    return record


def finished_record(name: str, config: TasksConfig) -> dict[str, Any] | None:
    """Return the record of a task, or None if the task is not finished.

    Raises:
        UserError: the folder holds something else, or the task was made with other settings.
    """
    return read_finished(join(config.output, name), _settings(config, name))


def read_finished(path: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of the task in a folder, or None if the task is not finished. Errors are as above."""
    with user_errors(f"{path}: can't be read"):
        store = open_store(path)
        files = store.list()
        content = store.read(TASK_RECORD) if TASK_RECORD in files else None
    if content is None:
        # An interrupted run leaves tables beside its marker; any other file means that the folder is not a task's.
        tables = [name for name in files if STARTED in files and name.endswith(".parquet")]
        if others := files.keys() - {STARTED, *tables}:
            raise UserError(f"{path} holds something else ({min(others)}); choose another output")
        return None
    try:
        record = json.loads(content)
        recorded = record["settings"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path}/{TASK_RECORD} is not a task's record; choose another output") from None
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
    columns: list[str],
    make: Callable[..., TableRow],
    label_column: str | None = None,
) -> None:
    """Write each split, and keep the names of the labels. A missing `validation` is taken from `train`.

    `make` returns a row for the values of `columns`.
    """
    for name, split in task.splits.items():
        table = writer.table(task.source, split, [*columns, *filter(None, [task.id_column])])
        if label_column is not None:
            writer.label_names = _label_names(table, label_column, task)
        tables = {name: table}
        if name == "train" and "validation" not in task.splits:
            train, validation = table.divide(1 - writer.config.validation_fraction, writer.config.seed)
            tables = {"validation": validation, "train": train}
        for output, part in tables.items():
            of_rows = split if len(tables) == 1 else output  # two parts of one split need ids that differ
            writer.write(output, task.kind, part.convert(_with_ids(make, len(columns), of_rows)), len(part))


def _with_ids(make: Callable[..., TableRow], width: int, split: str) -> Callable[..., list[TableRow]]:
    """Add an id to each row: the value after the first `width` values or, without one, the split and row number."""
    numbers = itertools.count()

    def rows(*values: Any) -> list[TableRow]:
        number = next(numbers)
        id = str(values[width]) if len(values) > width else f"{split}-{number}"
        return [{"id": id, **make(*values[:width])}]

    return rows


def _label_names(table: Table, column: str, task: Any) -> list[str]:
    names, dataset_names = task.label_names, table.label_names(column)
    if names is not None and dataset_names is not None and names != dataset_names:
        given, expected = ", ".join(names), ", ".join(dataset_names)
        raise UserError(f"{table.source}: label_names are {given}, but the dataset says {expected}")
    if names := names or dataset_names or labels_in_files(task.source, column):
        return names
    raise UserError(f"{table.source}: doesn't name its labels: give label_names, in the order of their numbers")


def _label_number(label: Any, names: list[str] | None) -> int:
    """Return the number of a label, given by name or by number. The numbers in a CSV file are texts."""
    assert names is not None
    number = names.index(label) if label in names else label
    if isinstance(number, str) and number.isdecimal() and not any(name.isdecimal() for name in names):
        number = int(number)
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise InvalidRow(f"the label {label!r} is not one of {len(names)}")
    return number


def _finite_number(label: Any) -> float:
    """Return a finite number, given as a number or, as in a CSV file, as text."""
    with suppress(TypeError, ValueError):
        if math.isfinite(number := float(label)):
            return number
    raise InvalidRow(f"the label {label!r} is not a finite number")


def _write_labelled_texts(writer: TaskWriter, task: ClassificationSet | RegressionSet) -> None:
    names_column = task.label_column if isinstance(task, ClassificationSet) else None

    def make(text: Any, label: Any, pair: Any = None) -> TableRow:
        require_strings("text", text, *([pair] if task.text_pair_column else []))
        target = _finite_number(label) if names_column is None else _label_number(label, writer.label_names)
        return {"text": text, "text_pair": pair, "label": target}

    columns = [task.text_column, task.label_column, *filter(None, [task.text_pair_column])]
    _write_splits(writer, task, columns, make, names_column)


def _write_tokens(writer: TaskWriter, task: TokensSet) -> None:
    def make(tokens: Any, labels: Any) -> TableRow:
        if labels and all(isinstance(label, str) for label in labels):
            labels = as_bio(labels)
        numbers = [_label_number(label, writer.label_names) for label in labels or []]
        if not tokens:
            raise InvalidRow("there are no tokens")
        if len(tokens) != len(numbers):
            raise InvalidRow("the numbers of labels and tokens differ")
        names = [(writer.label_names or [])[number] for number in numbers]
        for before, name in itertools.pairwise(["O", *names]):
            # The names are in the wrong order, or the tags are not BIO.
            if name.startswith("I-") and before[2:] != name[2:]:
                raise InvalidRow(f"{name} follows {before}")
        require_strings("token", *tokens)
        return {"tokens": tokens, "labels": numbers}

    _write_splits(writer, task, [task.tokens_column, task.labels_column], make, task.labels_column)


def _write_question_answering(writer: TaskWriter, task: QuestionAnsweringSet) -> None:
    def make(question: Any, context: Any, answers: Any) -> TableRow:
        require_strings("question", question)
        require_strings("context", context)
        return {"question": question, "context": context, "answers": _answers(answers, context)}

    _write_splits(writer, task, [task.question_column, task.context_column, "answers"], make)


def _answers(answers: Any, context: str) -> TableRow:
    """Return answers in SQuAD's format, from this format or from texts. Each must be at its position in the context."""
    if isinstance(answers, dict) and answers.keys() >= {"text", "answer_start"}:
        texts, starts = list(answers["text"]), list(answers["answer_start"])
    elif isinstance(answers, list) and all(isinstance(text, str) for text in answers):
        texts = list(dict.fromkeys(answers))
        starts = [context.find(text) for text in texts]
    else:
        raise InvalidRow("the answers are neither {text, answer_start} nor texts")
    if len(texts) != len(starts):
        raise InvalidRow("the numbers of answers and their answer_start differ")
    for text, start in zip(texts, starts, strict=True):
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise InvalidRow("the answer's text is not at answer_start")
    return {"text": texts, "answer_start": starts}


WRITERS: dict[str, Callable[[TaskWriter, Any], None]] = {
    "classification": _write_labelled_texts,
    "regression": _write_labelled_texts,
    "tokens": _write_tokens,
    "question_answering": _write_question_answering,
    "retrieval": write_retrieval,
}


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """Return the named tasks, or all tasks if none is named; a UserError for a task that is not in the YAML."""
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def plan_tasks(config: TasksConfig, names: list[str]) -> JobPlan:
    """Return the plan. The first rows of local data are read. Datasets on the hub are not looked up."""
    job_plan = JobPlan(config.output, f"{config.job}, {len(names)} task{'s' * (len(names) > 1)}")
    for name in names:
        task = config.tasks[name]
        if isinstance(task, RetrievalSet):
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        paths, sources = [], {}
        for _, dataset, _ in source_datasets("", task):
            read = [dataset.path] if dataset.path else file_patterns(dataset)
            paths += read
            sources[" ".join(filter(None, [", ".join(read), dataset.name, dataset.revision]))] = True
        made = [path for path in paths if is_made_by_jobs(path)]
        missing = [path for path in made if not glob.glob(glob_pattern(os.path.expanduser(path)), recursive=True)]
        done = finished_record(name, config) is not None
        state = f"{', finished already' if done else ''} [{task.license}]"
        job_plan.lines[name] = f"{task.kind}, from {', '.join(sources)}: {', '.join(splits)}{state}"
        if done:
            continue
        job_plan.missing += [f"{name}: {path}: there is no such file or folder" for path in missing]
        if not missing and (problem := find_problem(name, config)) is not None:
            job_plan.problems.append(problem if problem.startswith(f"{name}: ") else f"{name}: {problem}")
    return job_plan


def describe_record(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    remarks = ""
    for key, words in (("left_out", "left out"), ("not_used", "not used")):
        counts = [f"{count:,} of {file} ({reason})"
                  for file, reasons in record[key].items() for reason, count in reasons.items()]  # fmt: skip
        remarks += f"; {words}: {', '.join(counts)}" if counts else ""
    warnings = [f"\n  WARNING: {warning}" for warning in record["warnings"]]
    return f"{name}: {rows} rows{remarks}; {path} [{record['license']}]{''.join(warnings)}"


class _FirstRows:
    """Stands in for `TaskWriter`, but reads only the first rows of each table and writes nothing."""

    def __init__(self, name: str, config: TasksConfig):
        self.name, self.config = name, config
        self.label_names: list[str] | None = None

    def table(self, config: DatasetConfig, split: str, columns: list[str]) -> Table:
        return open_table(config, split, columns, _ROWS)

    def write(self, name: str, schema: str, rows: Rows, total: int) -> None:
        """Raise a UserError if most rows are invalid, except for qrels: their documents may come later."""
        checked = list(rows)
        invalid = [row.args for row in checked if isinstance(row, InvalidRow)]
        if schema != "qrels" and len(invalid) > len(checked) / 2:
            kind, position = invalid[0]
            raise UserError(
                f"{name}: {len(invalid)} of the first {len(checked)} rows can't be used: {position}: {kind}"
            )


def find_problem(name: str, config: TasksConfig) -> str | None:
    """Return the error that the first rows of a task's data cause, or None. Data from the hub is not checked."""
    task, first_rows = config.tasks[name], _FirstRows(name, config)
    paths = [dataset.path for _, dataset, _ in source_datasets("", task) if dataset.path is not None]
    try:
        if all(is_local_path(path) or Path(path).is_dir() for path in paths):
            write: Any = WRITERS[task.kind]
            write(first_rows, task)
    except UserError as error:
        return str(error)
    return None
