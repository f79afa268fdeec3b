"""Write the tables of datasets for classification, regression, token labels and question answering."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from biphasic.config.tasks import (
    ClassificationSet,
    DatasetConfig,
    MultiLabelSet,
    QuestionAnsweringSet,
    RegressionSet,
    SupervisedSet,
    TokensSet,
)
from biphasic.downstream.labels import Labels, TagScheme, id_text, label_text, number, read_names, whole_number
from biphasic.downstream.tables import InvalidRow, Table, TableRow, open_table, require_strings
from biphasic.downstream.writer import TaskWriter
from biphasic.errors import UserError

_SHOWN = 12


def _write_splits(
    writer: TaskWriter, task: SupervisedSet, tables: dict[str, Table], make: Callable[..., TableRow], width: int
) -> None:
    """Write each split. A missing `validation` is taken from `train`.

    `make` returns a row for the first `width` columns of a table.
    """
    for name, table in tables.items():
        split, parts = task.splits[name], {name: table}
        if name == "train" and "validation" not in task.splits:
            train, validation = table.divide(1 - writer.config.validation_fraction, writer.config.seed)
            parts = {"validation": validation, "train": train}
        for output, part in parts.items():
            of_rows = split if len(parts) == 1 else output  # two parts of one split need ids that differ
            writer.write(output, task.kind, part.convert(_with_ids(make, width, of_rows)), len(part))


def _tables(writer: TaskWriter, task: SupervisedSet, columns: list[str]) -> dict[str, Table]:
    columns = [*columns, *filter(None, [task.id_column])]
    return {name: writer.table(task.source, split, columns) for name, split in task.splits.items()}


def _with_ids(make: Callable[..., TableRow], width: int, split: str) -> Callable[..., list[TableRow]]:
    """Add an id to each row: the value after the first `width` values or, if it is missing, the split and row number."""
    numbers = itertools.count()

    def rows(*values: Any) -> list[TableRow]:
        row_number = next(numbers)
        id = id_text(values[width]) if len(values) > width else ""
        return [{"id": id or f"{split}-{row_number}", **make(*values[:width])}]

    return rows


def _named_labels(tables: dict[str, Table], column: str, given: list[str] | None, key: str) -> Labels | None:
    """Return the labels that the dataset itself or `label_names` names, if one does; a UserError if they differ."""
    table, *others = tables.values()
    declared = table.label_names(column)
    for other in others:
        if (names := other.label_names(column)) != declared:
            shown, expected = (", ".join(each or ["not named"]) for each in (names, declared))
            problem = f"the labels are {shown}, but those of {table.source} are {expected}"
            raise UserError(f"{other.source}: {key}: {problem}: expected the same names in the same order")
    if declared is not None and given not in (None, declared):
        shown, expected = ", ".join(given or []), ", ".join(declared)
        raise UserError(f"{table.source}: label_names are {shown}, but the dataset says {expected}")
    names = given if declared is None else declared
    return None if names is None else Labels(names, declared is not None, table.source, key)


def _values(config: DatasetConfig, split: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of columns in every row of a split."""
    for row in open_table(config, split, columns).convert(lambda *values: [{"values": values}]):
        if isinstance(row, dict):
            yield row["values"]


def _read_label_names(writer: TaskWriter, task: ClassificationSet | MultiLabelSet, tables: dict[str, Table]) -> Labels:
    """Return the labels of `label_column`, named by the dataset, by `label_names` or by the values in all splits."""
    column, key, table = task.label_column, f"label_column {task.label_column!r}", next(iter(tables.values()))
    if (labels := _named_labels(tables, column, task.label_names, key)) is not None:
        writer.label_names = labels.names
        return labels

    def values(split: str) -> Iterator[Any]:
        for (value,) in _values(task.source, split, [column]):
            with suppress(InvalidRow):  # counted when the table is written
                yield from _as_list(value, task.label_separator) if isinstance(task, MultiLabelSet) else [value]

    by_split = {split: read_names(values(split), table.source, key) for split in dict.fromkeys(task.splits.values())}
    writer.label_names = read_names(itertools.chain(*by_split.values()), table.source, key)
    if not writer.label_names:
        advice = ": expected lists; label_separator divides a text" if isinstance(task, MultiLabelSet) else ""
        raise UserError(f"{table.source}: {key} has no labels{advice}")
    _note_labels(writer, "from the data: ")
    if "train" in task.splits:
        known = set(by_split[task.splits["train"]])
        if unseen := [name for name in writer.label_names if name not in known]:
            counts = f"{len(unseen)} of {len(writer.label_names)} labels"
            writer.record["warnings"].append(f"{counts} are not in train: {', '.join(unseen[:_SHOWN])}")
    return Labels(writer.label_names, False, table.source, key)


def _note_labels(writer: TaskWriter, how: str) -> None:
    names = writer.label_names or []
    more = ", …" * (len(names) > _SHOWN)
    writer.notes.append(f"labels: {len(names)}, {how}{', '.join(names[:_SHOWN])}{more}")


def _as_list(value: Any, separator: str | None) -> list[Any]:
    """Return the labels of a text, from a list or from a text with separators; an `InvalidRow` for another value."""
    if isinstance(value, str) and separator is not None:
        return [part.strip() for part in value.split(separator) if part.strip()]
    if value is None and separator is not None:  # an empty field of a CSV file
        return []
    if not isinstance(value, list):
        advice = "" if separator else "; label_separator divides a text"
        raise InvalidRow(f"the labels {value!r:.40} are not a list{advice}")
    return value


def _require_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRow(f"{what} is {value!r:.40}, which is not a list")
    return value


def _write_labelled_texts(writer: TaskWriter, task: RegressionSet | MultiLabelSet) -> None:
    columns = [task.text_column, *filter(None, [task.text_pair_column])]
    texts = len(columns)
    names = dict(zip(("text", "text_pair"), columns, strict=False))
    columns += (task.label_columns if isinstance(task, MultiLabelSet) else None) or [task.label_column]
    tables = _tables(writer, task, columns)
    target = _targets(writer, task, tables)

    def make(*values: Any) -> TableRow:
        row: TableRow = {"text": None, "text_pair": None, **dict(zip(names, values, strict=False))}
        for name, column in names.items():
            require_strings(f"{name}_column {column!r}", row[name])
        return {**row, **target(*values[texts:])}

    _write_splits(writer, task, tables, make, len(columns))


def _targets(writer: TaskWriter, task: RegressionSet | MultiLabelSet, tables: dict[str, Table]) -> Callable[..., TableRow]:
    """Return the function that makes a row's target from the values of its label columns."""
    if isinstance(task, MultiLabelSet):
        if columns := task.label_columns:
            writer.label_names = list(columns)
            return lambda *values: {"labels": [at for at, value in enumerate(values) if _is_set(columns[at], value)]}
        labels = _read_label_names(writer, task, tables)
        return lambda value: {"labels": sorted({labels.number(each) for each in _as_list(value, task.label_separator)})}
    if isinstance(task, ClassificationSet):
        labels = _read_label_names(writer, task, tables)
        return lambda value: {"label": labels.number(value)}
    return lambda value: {"label": number(value, f"label_column {task.label_column!r}")}


def _is_set(column: str, value: Any) -> bool:
    text = label_text(value) if value not in (None, "") else ""
    if text not in ("0", "1", "true", "false"):
        raise InvalidRow(f"label_columns: {column} is {value!r:.40}; expected 0 or 1, true or false")
    return text in ("1", "true")


def _write_tokens(writer: TaskWriter, task: TokensSet) -> None:
    columns, source = [task.tokens_column, task.labels_column], task.source
    key = f"a label of labels_column {task.labels_column!r}"
    tables = _tables(writer, task, columns)
    table = next(iter(tables.values()))
    if (labels := _named_labels(tables, task.labels_column, task.label_names, key)) is not None:
        scheme = TagScheme(labels.names, table.source)
        writer.label_names = scheme.bio_names(labels.names)
    else:
        splits = source.files if source.files and not source.path else set(task.splits.values())
        pairs = set[tuple[str, str]]()  # each label with the one before it
        for tags in (tags for split in splits for _, tags in _values(source, split, columns) if isinstance(tags, list)):
            pairs.update(itertools.pairwise(["O", *(tag for tag in tags if isinstance(tag, str))]))
        if not pairs:
            problem = f"labels_column {task.labels_column!r} has no lists of names"
            raise UserError(f"{table.source}: {problem}: if it has lists of numbers, give label_names in their order")
        scheme = TagScheme(dict.fromkeys(label for _, label in sorted(pairs)), table.source)
        names = {"O", *(scheme.to_bio(pair)[1] for pair in pairs)}
        writer.label_names = sorted(names, key=lambda name: (name != "O", name[2:], name))
        labels = Labels(sorted({label for _, label in pairs}), False, table.source, key)
    _note_labels(writer, "" if scheme.name == "BIO" else f"BIO, made from {scheme.name}: ")
    numbers = {name: at for at, name in enumerate(writer.label_names)}

    def make(tokens: Any, tags: Any) -> TableRow:
        names = [labels.names[labels.number(tag)] for tag in _require_list(tags, f"labels_column {task.labels_column!r}")]
        if not _require_list(tokens, f"tokens_column {task.tokens_column!r}"):
            raise InvalidRow("there are no tokens")
        if len(tokens) != len(names):
            raise InvalidRow("the numbers of labels and tokens differ")
        require_strings(f"a word of tokens_column {task.tokens_column!r}", *tokens)
        # Of numbers the names may be in the wrong order, which no scheme tells from IOB.
        if scheme.is_bio and not all(isinstance(tag, str) for tag in tags):
            for before, name in itertools.pairwise(["O", *names]):
                if name.startswith("I-") and before[2:] != name[2:]:
                    raise InvalidRow(f"{name} follows {before}")
        return {"tokens": tokens, "labels": [numbers[name] for name in scheme.to_bio(names)]}

    _write_splits(writer, task, tables, make, len(columns))


def _write_question_answering(writer: TaskWriter, task: QuestionAnsweringSet) -> None:
    def make(question: Any, context: Any, answers: Any) -> TableRow:
        require_strings(f"question_column {task.question_column!r}", question)
        require_strings(f"context_column {task.context_column!r}", context)
        return {"question": question, "context": context, "answers": _answers(answers, context)}

    columns = [task.question_column, task.context_column, "answers"]
    _write_splits(writer, task, _tables(writer, task, columns), make, len(columns))


def _answers(answers: Any, context: str) -> TableRow:
    """Return answers in SQuAD's format, from this format or from texts. Each must be at its position in the context."""
    if isinstance(answers, dict) and answers.keys() >= {"text", "answer_start"}:
        texts, starts = _require_list(answers["text"], "text"), _require_list(answers["answer_start"], "answer_start")
        starts = [whole_number(start, "answer_start") for start in starts]
    elif isinstance(answers, list) and all(isinstance(text, str) for text in answers):
        texts = list(dict.fromkeys(answers))
        starts = [context.find(text) for text in texts]
    else:
        raise InvalidRow("the answers are neither {text, answer_start} nor texts")
    if len(texts) != len(starts):
        raise InvalidRow("the numbers of answers and their answer_start differ")
    for text, start in zip(texts, starts, strict=True):
        require_strings("an answer's text", text)
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise InvalidRow("the answer's text is not at answer_start")
    return {"text": texts, "answer_start": starts}


SUPERVISED_WRITERS: dict[str, Callable[[Any, Any], None]] = {
    "classification": _write_labelled_texts,
    "multi_label": _write_labelled_texts,
    "regression": _write_labelled_texts,
    "tokens": _write_tokens,
    "question_answering": _write_question_answering,
}
