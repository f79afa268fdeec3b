"""One rule for the labels of all file types, names read from the data, and tagging schemes."""

import csv
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from seqeval.metrics import f1_score

from biphasic.config.tasks import DatasetConfig
from biphasic.downstream.labels import TagScheme
from biphasic.downstream.prepare import prepare_task
from biphasic.downstream.tables import open_table
from biphasic.errors import UserError
from helpers.downstream_sets import jsonl, one_task, rows_of


def write(path: Path, labels: list[Any], name: str = "label") -> str:
    """A file of texts with labels, as its kind stores them; returns the path."""
    if path.suffix == ".jsonl":
        return jsonl(path, [{"text": f"text {at}", name: label} for at, label in enumerate(labels)])
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [f"text {at}" for at in range(len(labels))], name: labels}), path)
        return str(path)
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        rows.writerows([["text", name], *([f"text {at}", label] for at, label in enumerate(labels))])
    return str(path)


def classified(folder: Path, files: dict[str, str], **keys: Any) -> tuple[Any, list[str], list[int]]:
    """The configuration, the label names and the numbers of the first split's labels of a prepared task."""
    task = {"kind": "classification", "text_column": "text", **keys, "splits": {name: name for name in files}}
    task["splits"].setdefault("validation", next(iter(files)))
    task["source"] = {"files": {name: [file] for name, file in files.items()}}
    config = one_task(folder, task)
    record = prepare_task("it", config)
    rows = rows_of(folder / "out" / "it", next(iter(files)))
    return record, record["label_names"], [row["label"] for row in rows]


KINDS = [".jsonl", ".csv", ".tsv", ".parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([1, 2, 5, 4, 3], ["1", "2", "3", "4", "5"], [0, 1, 4, 3, 2]),
        ([1.0, 2.0, 5.0, 4.0, 3.0], ["1", "2", "3", "4", "5"], [0, 1, 4, 3, 2]),
        ([0, 2, 1, 1, 0], ["0", "1", "2"], [0, 2, 1, 1, 0]),
        ([2, 0, 1, 1, 0], ["2", "0", "1"], [0, 1, 2, 2, 1]),
        ([0, 2, 1, 1, 0], ["neg", "neutral", "pos"], [0, 2, 1, 1, 0]),
        (["pos", "neg", "neg"], ["neg", "pos"], [1, 0, 0]),
        ([True, False, True], ["False", "True"], [1, 0, 1]),
        ([True, False, True], ["true", "false"], [0, 1, 0]),
        ([10, 9, 100, 9], None, [1, 0, 2, 0]),
        ([True, False, True], None, [1, 0, 1]),
        (["b", "a", "b"], None, [1, 0, 1]),
    ],
)
def test_a_label_is_the_same_in_every_kind_of_file(
    tmp_path: Path, kind: str, labels: list[Any], names: list[str] | None, expected: list[int]
) -> None:
    keys = {} if names is None else {"label_names": names}
    _, named, numbers = classified(tmp_path, {"test": write(tmp_path / f"a{kind}", labels)}, **keys)
    assert numbers == expected
    if names is None:
        shown = [str(label).lower() if isinstance(label, bool) else str(label) for label in sorted(set(labels))]
        assert named == shown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([True, False], ["neg", "pos"], "row 1: the label .* is not one of neg, pos"),
        ([6, 1], ["1", "2", "3", "4", "5"], "row 1: the label .* is not one of 1, 2, 3, 4, 5$"),
        ([0, 1], ["1", "2"], "row 1: the label .* is not one of 1, 2$"),
        ([1, 2], ["001", "002"], "row 1: the label .* is not one of 001, 002$"),
        ([2**40, 1], ["a", "b"], "row 1: the label .* is not one of a, b, nor an index from 0 to 1"),
        ([1e39, 1.0], ["a", "b"], "row 1: the label"),
        (["a", ""], ["a", "b"], "row 2: label_column 'label' is empty"),
        (["neg", " neg"], None, "the labels 'neg' and ' neg' differ only by case or spaces|' neg' and 'neg'"),
        (["neg", "Neg"], None, "the labels 'Neg' and 'neg' differ only by case or spaces"),
        ([0.5, 1.5], None, "label_column 'label': 0.5 is not a label: expected kind: regression"),
        ([f"text {at}" for at in range(1200)], None, "has more than 1,000 different values, such as 'text "),
        (["a", "b"], ["1", "1.0"], "label_names: 1 and 1.0 are the same label"),
    ],
)
def test_values_that_are_no_labels_are_refused(
    tmp_path: Path, kind: str, labels: list[Any], names: list[str] | None, message: str
) -> None:
    task: dict[str, Any] = {"kind": "classification", "text_column": "text", "splits": {"test": "a"}}
    task |= {"label_names": names, "source": {"files": {"a": [write(tmp_path / f"a{kind}", labels)]}}}
    config = one_task(tmp_path, task)
    with pytest.raises(UserError, match=message):
        prepare_task("it", config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [None, ["+1", "0010", "010", "10"]])
def test_codes_with_leading_zeros_are_labels_of_their_own(tmp_path: Path, kind: str, names: list[str] | None) -> None:
    """`+1` and `010` are texts in every program that writes them as such."""
    file = write(tmp_path / f"a{kind}", ["010", "10", "0010", "+1", "10.0"])
    _, named, numbers = classified(tmp_path, {"test": file}, label_names=names)
    assert named == ["+1", "0010", "010", "10"] and numbers == [2, 3, 1, 0, 3]


def test_decimal_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [Decimal("1"), Decimal("2"), Decimal("1")])
    assert classified(tmp_path / "whole", {"test": file})[1:] == (["1", "2"], [0, 1, 0])
    file = write(tmp_path / "b.parquet", [Decimal("1.00"), Decimal("2.00")])
    assert classified(tmp_path / "decimals", {"test": file})[1:] == (["1", "2"], [0, 1])


def test_names_come_from_all_splits_and_those_without_training_are_told(tmp_path: Path) -> None:
    files = {"train": write(tmp_path / "a.csv", ["b", "a", "b"] * 9), "test": write(tmp_path / "b.csv", ["c", "a"])}
    record, names, numbers = classified(tmp_path, files)
    assert names == ["a", "b", "c"] and numbers[:3] == [1, 0, 1]
    assert "1 of 3 labels are not in train: c" in record["warnings"]


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "a.csv"
    twice.write_text("text,other,other,label,text\nx,1,2,a,y\n")
    task = {"kind": "classification", "text_column": "text", "source": {"files": {"a": [str(twice)]}}}
    with pytest.raises(UserError, match="two columns are named 'text'"):
        prepare_task("it", one_task(tmp_path, {**task, "splits": {"test": "a"}}))
    twice.write_text("text,other,other,label\nx,1,2,a\n")  # a column that isn't used
    classified(tmp_path / "unused", {"test": str(twice)})


def tagged(folder: Path, sentences: list[str], suffix: str = ".conll", **keys: Any) -> tuple[list[str], list[list[str]]]:
    """The label names, and the names of each sentence's labels, of a set whose words are w0, w1, …"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"a{suffix}"
    if suffix == ".conll":
        parts = ["".join(f"w{at} {label}\n" for at, label in enumerate(each.split())) for each in sentences]
        path.write_text("\n".join(parts))
    else:
        rows = [{"tokens": [f"w{at}" for at, _ in enumerate(each.split())], "labels": each.split()} for each in sentences]
        jsonl(path, rows)
    task = {"kind": "tokens", "labels_column": "labels", "source": {"files": {"a": [str(path)]}}, **keys}
    config = one_task(folder, {**task, "splits": {"test": "a"}})
    names = prepare_task("it", config)["label_names"]
    return names, [[names[number] for number in row["labels"]] for row in rows_of(folder / "out" / "it", "test")]


@pytest.mark.parametrize("suffix", [".conll", ".jsonl"])
@pytest.mark.parametrize(
    ("labels", "bio"),
    [
        ("LOC LOC O PER SUR EVENT", "B-LOC I-LOC O B-PER B-SUR B-EVENT"),
        ("person-other person-other O location-GPE", "B-person-other I-person-other O B-location-GPE"),
        ("PER-B PER-I O LOC-B", "B-PER I-PER O B-LOC"),
        ("PER-B PER-E O LOC-S", "B-PER I-PER O B-LOC"),
        ("B_PER I_PER O B_LOC", "B-PER I-PER O B-LOC"),
        ("B-PER M-PER E-PER W-LOC O", "B-PER I-PER I-PER B-LOC O"),
        ("B I O B B", "B-entity I-entity O B-entity B-entity"),
        ("E-mail O hepatitis-B", "B-E-mail O B-hepatitis-B"),
        ("I-PER I-PER B-PER O", "B-PER I-PER B-PER O"),
    ],
)
def test_schemes_become_bio(tmp_path: Path, labels: str, bio: str, suffix: str) -> None:
    names, sentences = tagged(tmp_path, [labels, "O O"], suffix)
    assert sentences == [bio.split(), ["O", "O"]]
    assert names[0] == "O" and all(name[:2] in ("B-", "I-") for name in names[1:])


def test_label_names_may_be_those_of_the_source(tmp_path: Path) -> None:
    names, sentences = tagged(tmp_path / "names", ["LOC LOC O PER"], label_names=["O", "PER", "LOC"])
    assert names == ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    assert sentences == [["B-LOC", "I-LOC", "O", "B-PER"]]
    task = {"kind": "tokens", "labels_column": "labels", "label_names": ["O", "PER", "LOC"], "splits": {"test": "a"}}
    rows = [{"tokens": ["a", "b", "c"], "labels": [2, 2.0, 1]}]
    task["source"] = {"files": {"a": [jsonl(tmp_path / "numbers.jsonl", rows)]}}
    prepare_task("it", one_task(tmp_path, task))
    assert rows_of(tmp_path / "out" / "it", "test")[0]["labels"] == [3, 4, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("B-PER I-PER O LOC", "some labels have BIO's tags, such as B-PER, and others have none, such as LOC"),
        ("PER-B PER-I LOC O", "some labels have BIO's tags, such as PER-B, and others have none, such as LOC"),
        ("PER LOC PER", "has no label O, for words outside entities"),
    ],
)
def test_labels_of_no_scheme_are_refused(tmp_path: Path, labels: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tagged(tmp_path, [labels])


@pytest.mark.parametrize("value", [True, 7, -1, 0.5, None, "x"])
def test_label_values_of_words_that_are_none(tmp_path: Path, value: Any) -> None:
    names = ["O", "B-PER"]
    rows = [{"tokens": ["a", "b"], "labels": [0, value]}]
    task = {"kind": "tokens", "labels_column": "labels", "label_names": names, "splits": {"test": "a"}}
    config = one_task(tmp_path, {**task, "source": {"files": {"a": [jsonl(tmp_path / "a.jsonl", rows)]}}})
    with pytest.raises(UserError, match=r"row 1: (the label|a label of labels_column 'labels' is empty)"):
        prepare_task("it", config)


def test_f1_of_io_labels_is_that_of_runs() -> None:
    """Of two entities one is found: F1 is 2 * 1 / (2 + 1). seqeval reads the source's labels as none or as others."""
    gold, predicted = ["LOC", "LOC", "O", "PER"], ["LOC", "LOC", "O", "O"]
    scheme = TagScheme([*gold, *predicted], "it")
    assert f1_score([scheme.to_bio(gold)], [scheme.to_bio(predicted)]) == pytest.approx(2 / 3)


def multi(folder: Path, file: str, **keys: Any) -> tuple[list[str], list[list[int]]]:
    task = {"kind": "multi_label", "text_column": "text", "source": {"files": {"a": [file]}}, "splits": {"test": "a"}}
    config = one_task(folder, {**task, **keys})
    record = prepare_task("it", config)
    return record["label_names"], [row["labels"] for row in rows_of(folder / "out" / "it", "test")]


def test_several_labels_from_lists_texts_and_columns(tmp_path: Path) -> None:
    lists = write(tmp_path / "a.jsonl", [["b", "a"], [], ["c"], ["b", "b"]], "labels")
    assert multi(tmp_path / "lists", lists) == (["a", "b", "c"], [[0, 1], [], [2], [1]])
    texts = write(tmp_path / "a.csv", ["b|a", "", " c", "b|b"], "labels")
    assert multi(tmp_path / "texts", texts, label_separator="|") == (["a", "b", "c"], [[0, 1], [], [2], [1]])
    numbers = write(tmp_path / "n.jsonl", [[0], [1, 2.0]], "labels")
    assert multi(tmp_path / "numbers", numbers, label_names=["x", "y", "z"]) == (["x", "y", "z"], [[0], [1, 2]])
    rows = [{"text": "t", "b": 1, "a": 0}, {"text": "u", "b": True, "a": "1"}, {"text": "v", "b": 0.0, "a": False}]
    columns = jsonl(tmp_path / "c.jsonl", rows)
    assert multi(tmp_path / "columns", columns, label_columns=["b", "a"]) == (["b", "a"], [[0], [0, 1], []])


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"labels": "a"}, {}, "'labels' has no labels: expected lists; label_separator divides a text"),
        ({"labels": None}, {"label_names": ["a"]}, "the labels None are not a list"),
        ({"labels": ["x"]}, {"label_names": ["a"]}, "the label 'x' is not one of a"),
        ({"a": 2}, {"label_columns": ["a"]}, "label_columns: a is 2; expected 0 or 1"),
        ({"a": None}, {"label_columns": ["a"]}, "label_columns: a is None"),
    ],
)
def test_several_labels_that_are_refused(tmp_path: Path, row: Any, keys: Any, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "t", **row}) + "\n")
    with pytest.raises(UserError, match=message):
        multi(tmp_path, str(path), **keys)


def named(names: list[str], in_lists: bool = False) -> Dataset:
    """Rows with the dataset's own label names, each once."""
    labels, text = list(range(len(names))), {"text": [f"text {at}" for at in range(len(names))]}
    if in_lists:
        features = Features({"tokens": Sequence(Value("string")), "label": Sequence(ClassLabel(names=names))})
        return Dataset.from_dict({"tokens": [text["text"]], "label": [labels]}, features)
    return Dataset.from_dict(
        {**text, "label": labels}, Features({"text": Value("string"), "label": ClassLabel(names=names)})
    )


@pytest.mark.parametrize("kind", ["classification", "tokens"])
def test_label_names_that_differ_between_splits_are_refused(tmp_path: Path, kind: str) -> None:
    """As `class_encode_column` makes them of files of which one lacks a label."""
    names = {"train": ["O", "B-LOC", "B-ORG"], "test": ["O", "B-ORG"]}
    for split, given in names.items():
        named(given, kind == "tokens").to_parquet(tmp_path / f"{split}.parquet")
    columns = {"labels_column": "label"} if kind == "tokens" else {"text_column": "text"}
    files = {split: [f"{tmp_path}/{split}.parquet"] for split in names}
    splits = {"train": "train", "validation": "train", "test": "test"}
    task = {"kind": kind, **columns, "source": {"files": files}, "splits": splits}
    problem = f"the labels are O, B-ORG, but those of {tmp_path}/train.parquet are O, B-LOC, B-ORG"
    with pytest.raises(UserError, match=f"test.parquet: .*'label': {problem}: expected the same names in the same order"):
        prepare_task("it", one_task(tmp_path, task))
    pq.write_table(pq.read_table(tmp_path / "test.parquet").replace_schema_metadata(None), tmp_path / "test.parquet")
    with pytest.raises(UserError, match="the labels are not named, but those of"):
        prepare_task("it", one_task(tmp_path, task))


@pytest.mark.parametrize("layout", ["files", "a folder of Parquet", "save_to_disk"])
def test_label_names_that_differ_between_files_are_refused(tmp_path: Path, layout: str) -> None:
    """The datasets library would cast the second file to the first one's names."""
    first, second, folder = named(["neg", "pos"]), named(["pos", "neg"]), tmp_path / "set"
    if layout == "save_to_disk":
        DatasetDict(train=first, test=second).save_to_disk(folder)
    else:
        folder.mkdir()
        for name, rows in (("train-0", first), ("test-0", second)):
            rows.to_parquet(folder / f"{name}.parquet")
    source = {"files": {"test": [f"{folder}/train*", f"{folder}/test*"]}} if layout == "files" else {"path": str(folder)}
    config = one_task(
        tmp_path, {"kind": "classification", "text_column": "text", "source": source, "splits": {"test": "test"}}
    )
    kinds = [rf"ClassLabel\(names=\['{one}', '{two}'\]\)" for one, two in (("pos", "neg"), ("neg", "pos"))]
    with pytest.raises(
        UserError, match=f"test.*: column 'label' is {kinds[0]}, but in .*train.* it is {kinds[1]}: expected"
    ):
        prepare_task("it", config)


def test_answers_whose_fields_are_in_another_order_are_of_one_type(tmp_path: Path) -> None:
    for name, order in (("a", ["text", "answer_start"]), ("b", ["answer_start", "text"])):
        answer = {"text": ["x"], "answer_start": [3]}
        pq.write_table(pa.table({"answers": [{key: answer[key] for key in order}]}), tmp_path / f"{name}.parquet")
    table = open_table(DatasetConfig(files={"a": [str(tmp_path / "[ab].parquet")]}), "a", ["answers"])
    assert table.rows["answers"] == [answer, answer]


def test_types_that_differ_between_parquet_files(tmp_path: Path) -> None:
    """Booleans and numbers are refused, since 2 would be true; widths don't matter, nor a column of nulls."""
    label = {"a": pa.array([True, False]), "b": pa.array([2, 0]), "c": pa.array([1, 2], pa.int8()), "d": pa.nulls(2)}
    for name, values in label.items():
        pq.write_table(pa.table({"text": ["x", "y"], "label": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        UserError, match=r"b.parquet: column 'label' is number, but in .*a.parquet it is Value.'bool'.: expected"
    ):
        classified(tmp_path, {"test": str(tmp_path / "[ab].parquet")})
    table = open_table(DatasetConfig(files={"a": [str(tmp_path / "[bcd].parquet")]}), "a", ["text", "label"])
    assert table.rows["label"] == [2, 0, 1, 2, None, None]
