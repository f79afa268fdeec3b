"""Tasks from files of each kind, and rows of them that are no examples."""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset

from biphasic.config.tasks import DatasetConfig
from biphasic.downstream.prepare import prepare_task
from biphasic.downstream.tables import open_table
from biphasic.downstream.writer import TASK_RECORD
from biphasic.errors import UserError
from helpers.downstream_sets import TEXT, card, jsonl, one_task, rows_of, write_split


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv", "tsv"])
def test_files_of_each_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"train.{kind}"
    rows = [{"a": f"one, {at}", "b": f"two {at}", "gold": ["bad", "good"][at % 2]} for at in range(10)]
    rows[4] |= {"a": "null", "b": "NA"}
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind.startswith("jsonl"):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    else:
        mark = "\t" if kind == "tsv" else ","
        quotation = "" if kind == "tsv" else '"'
        values = [[f"{quotation}{value}{quotation}" for value in row.values()] for row in rows]
        lines = [mark.join(rows[0]), *map(mark.join, values)]
        path.write_text("\n".join([*lines, ""]))
    task = {
        "kind": "classification",
        "text_column": "a",
        "text_pair_column": "b",
        "label_column": "gold",
        "label_names": ["good", "bad"],
        "source": {"files": {"train": [str(path)]}},
        "splits": {"test": "train"},
    }
    prepare_task("it", one_task(tmp_path, task))
    row = {"id": "train-3", "text": "one, 3", "text_pair": "two 3", "label": 0}
    assert rows_of(tmp_path / "out" / "it", "test")[3] == row
    assert rows_of(tmp_path / "out" / "it", "test")[4] == {
        "id": "train-4",
        "text": "null",
        "text_pair": "NA",
        "label": 1,
    }


def test_hidden_files_are_read_only_if_the_pattern_names_them(tmp_path: Path) -> None:
    for name in ("a.jsonl", "_b.jsonl", "_temporary/0/a.jsonl", ".c.jsonl", "_date=2024/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / name, [{"name": name}])

    def names(*patterns: str) -> list[str]:
        files = [str(tmp_path / pattern) for pattern in patterns]
        return [row["name"] for row in open_table(DatasetConfig(files={"all": files}), "all", ["name"]).rows]

    assert names("**/*.jsonl") == ["_date=2024/d.jsonl", "a.jsonl"]
    assert names("_*.jsonl", ".c.jsonl", "_temporary/**/*.jsonl") == ["_b.jsonl", ".c.jsonl", "_temporary/0/a.jsonl"]
    with pytest.raises(UserError, match=r"there is no such file, or only hidden ones \(. or _\)"):
        names("*b.jsonl")


def test_answers_can_be_texts(tmp_path: Path) -> None:
    """ReCoRD from upstream."""
    row = {"passage": "Ann met Bob. Ann left.", "query": "@placeholder left", "answers": ["Ann", "Ann"]}
    task = {"kind": "question_answering", "question_column": "query", "context_column": "passage",
            "source": {"files": {"dev": [jsonl(tmp_path / "r.jsonl", [row])]}}, "splits": {"test": "dev"}}  # fmt: skip
    prepare_task("it", one_task(tmp_path, task))
    [row] = rows_of(tmp_path / "out" / "it", "test")
    assert row["answers"] == {"text": ["Ann"], "answer_start": [0]}


TOKENS = {"kind": "tokens", "labels_column": "tags", "label_names": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]}
GOOD = {"tokens": ["Ann", "Lee"], "tags": [1, 2]}
ASK = {"kind": "question_answering"}
ASKED = {"question": "Who?", "context": "It was Ann.", "answers": {"text": ["Ann"], "answer_start": [7]}}
TYPE = "a value has an unexpected type"
LABELS = {"kind": "classification", "text_column": "text", "label_names": ["a", "b"]}


@pytest.mark.parametrize(
    ("task", "good", "bad", "why"),
    [
        (TOKENS, GOOD, {"tokens": ["Ann"], "tags": [1, 2]}, "the numbers of labels and tokens differ"),
        (TOKENS, GOOD, {"tokens": [], "tags": []}, "there are no tokens"),
        (
            TOKENS,
            GOOD,
            {"tokens": ["Ann"], "tags": [5]},
            "the label 5 is not one of O, B-PER, I-PER, B-LOC, I-LOC, nor an index from 0 to 4",
        ),
        (TOKENS, GOOD, {"tokens": ["Ann", "Lee"], "tags": [1, 4]}, "I-LOC follows B-PER"),
        (TOKENS, GOOD, {"tokens": ["Ann"], "tags": 1}, "labels_column 'tags' is 1, which is not a list"),
        (TOKENS, GOOD, {"tokens": "['Ann']", "tags": [1]}, """tokens_column 'tokens' is "['Ann']", which is not a list"""),
        (ASK, ASKED, {**ASKED, "context": "It is Ann."}, "the answer's text is not at answer_start"),
        (ASK, ASKED, {**ASKED, "question": None}, "question_column 'question' is empty"),
        (
            ASK,
            ASKED,
            {**ASKED, "answers": {"text": None, "answer_start": []}},
            "text is None, which is not a list",
        ),
        (
            ASK,
            ASKED,
            {**ASKED, "answers": {"text": ["Ann"], "answer_start": [None]}},
            "answer_start: None is not a finite number of 32 bits",
        ),
        (
            ASK,
            ASKED,
            {**ASKED, "answers": {"text": "A", "answer_start": [7]}},
            "text is 'A', which is not a list",
        ),
        (
            LABELS,
            {"text": "t", "label": 0},
            {"text": "t", "label": -1},
            "the label -1 is not one of a, b, nor an index from 0 to 1",
        ),
        (LABELS, {"text": "t", "label": 0}, {"text": None, "label": 1}, "text_column 'text' is empty"),
    ],
)
def test_invalid_rows_are_left_out(
    tmp_path: Path, task: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], why: str
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [*[good] * 6, bad, *[good] * 3])
    task = {**task, "source": {"files": {"all": [file]}}, "splits": {"test": "all"}}
    with pytest.raises(UserError) as stopped:
        prepare_task("it", one_task(tmp_path, task))
    assert str(stopped.value) == (
        f"it: test: 1 of 10 rows can't be used, and max_invalid_share allows 0.10%; the first: {file}, row 7: {why}"
    )
    assert not (tmp_path / "out" / "it" / TASK_RECORD).exists()
    record = prepare_task("it", one_task(tmp_path, task, max_invalid_share=0.1))
    assert record["left_out"] == {"test": {why: 1}}
    assert record["rows"] == {"test": 9} and len(rows_of(tmp_path / "out" / "it", "test")) == 9


def test_words_in_a_csv_file_are_refused(tmp_path: Path) -> None:
    """It has no lists: the characters of a text aren't labels."""
    path = tmp_path / "a.csv"
    path.write_text('tokens,tags\n"[""Ann""]","[""O""]"\n')
    task = {"kind": "tokens", "labels_column": "tags", "source": {"files": {"all": [str(path)]}}, "splits": {"test": "all"}}
    with pytest.raises(
        UserError, match=r"a.csv: labels_column 'tags' has no lists of names: if it has lists of numbers, give"
    ):
        prepare_task("it", one_task(tmp_path, task))
    with pytest.raises(UserError, match=r"""labels_column 'tags' is '\["O"\]', which is not a list"""):
        prepare_task("it", one_task(tmp_path, {**task, "label_names": ["O", "B-PER"]}))


def test_an_invalid_row_is_shown_where_its_number_leads_nowhere(tmp_path: Path) -> None:
    """A pattern names no file, and the rows of a drawn validation split are in another order."""
    rows = [{"text": None if at == 37 else f"ticket {at}", "label": at % 2, "id": str(at)} for at in range(40)]
    for part in (0, 1):
        jsonl(tmp_path / f"{part}.jsonl", rows[part * 20 : part * 20 + 20])
    task = {**LABELS, "source": {"files": {"all": [str(tmp_path / "*.jsonl")]}}, "id_column": "id"}
    shown = """{"text": null, "label": 1, "id": "37"}: text_column 'text' is empty"""
    for split, place in (("test", "row 38"), ("train", "a row")):
        config = one_task(tmp_path / split, {**task, "splits": {split: "all"}}, validation_fraction=0.5)
        with pytest.raises(UserError) as stopped:
            prepare_task("it", config)
        assert str(stopped.value).endswith(f"; the first: {tmp_path}/*.jsonl, {place}, {shown}")


@pytest.mark.parametrize(
    ("table", "column", "values", "why"),
    [
        ("queries", "text", ["a", "b", None], "queries: 1 of 3 .*row 3: a query's text is empty"),
        ("queries", "text", [1, 2, 3], "queries: 3 of 3 .*row 1: a query's text is not text but int"),
        ("corpus", "text", [1, 2, 3], "corpus: 3 of 3 .*row 1: a document's text is not text but int"),
        (
            "qrels",
            "score",
            [1, 1, None],
            "qrels/test: 1 of 3 .*row 3: score_column 'score': None is not a finite number",
        ),
        ("qrels", "score", [1, 1, 0.5], "qrels/test: 1 of 3 .*row 3: score_column 'score': 0.5 is not a whole number"),
    ],
)
def test_invalid_rows_of_retrieval_sets(tmp_path: Path, table: str, column: str, values: list[Any], why: str) -> None:
    tables = {
        "queries": [{"_id": f"q{at}", "text": "w"} for at in range(3)],
        "corpus": [{"_id": f"d{at}", "title": None, "text": "w"} for at in range(3)],
        "qrels": [{"query-id": f"q{at}", "corpus-id": f"d{at}", "score": 1} for at in range(3)],
    }
    for row, value in zip(tables[table], values, strict=True):
        row[column] = value
    files = {name: {"files": {"train": [jsonl(tmp_path / f"{name}.jsonl", rows)]}} for name, rows in tables.items()}
    task = {
        "kind": "retrieval",
        "corpus": files["corpus"],
        "queries": [files["queries"]],
        "qrels": {"test": files["qrels"]},
    }
    with pytest.raises(UserError, match=why):
        prepare_task("it", one_task(tmp_path, task))
    if None in values:
        left = prepare_task("it", one_task(tmp_path, task, max_invalid_share=0.5))["rows"]
        assert left["qrels/test"] == 2


def test_missing_ids_and_those_of_pandas(tmp_path: Path) -> None:
    """An id that is missing isn't the text None, and 1.0, of a column with gaps, is 1."""
    ids = pd.Series([1, None, 3, 3.5])
    pd.DataFrame({"text": list("wxyz"), "label": [0, 1] * 2, "id": ids}).to_parquet(tmp_path / "a.parquet")
    task = {**LABELS, "source": {"files": {"all": [str(tmp_path / "a.parquet")]}}, "id_column": "id"}
    prepare_task("it", one_task(tmp_path, {**task, "splits": {"test": "all"}}))
    assert [row["id"] for row in rows_of(tmp_path / "out" / "it", "test")] == ["1", "all-1", "3", "3.5"]

    texts = [{"_id": id, "text": f"text {id}"} for id in (1, None, float("nan"), "", "2")]
    judgments = [{"query-id": one, "corpus-id": two, "score": 1} for one, two in ((1.0, 1), (2, 2.0), (None, 1), (1, None))]
    names = {"texts": texts, "judgments": judgments}
    files = {name: {"files": {"train": [jsonl(tmp_path / f"{name}.jsonl", rows)]}} for name, rows in names.items()}
    task = {
        "kind": "retrieval",
        "corpus": files["texts"],
        "queries": [files["texts"]],
        "qrels": {"test": files["judgments"]},
    }
    record = prepare_task("it", one_task(tmp_path / "retrieval", task, max_invalid_share=0.8))
    assert record["left_out"] == {
        "queries": {"a query's id is empty": 3},
        "corpus": {"a document's id is empty": 3},
        "qrels/test": {"a judgment's query id is empty": 1, "a judgment's document id is empty": 1},
    }
    written = [rows_of(tmp_path / "retrieval" / "out" / "it", table) for table in ("queries", "corpus", "qrels/test")]
    assert [[row["_id"] for row in rows] for rows in written[:2]] == [["1", "2"]] * 2
    assert [(row["query-id"], row["corpus-id"]) for row in written[2]] == [("1", "1"), ("2", "2")]


def test_values_of_unexpected_types_in_retrieval_sets(tmp_path: Path) -> None:
    texts = [{"_id": id, "text": "w"} for id in ("q0", "q1", "d0")]
    pairs = [{"query": "q", "positive": "p", "hard": hard} for hard in (["n"], [3], 3)]
    judgments = [{"query-id": f"q{n}", "lists": lists} for n, lists in enumerate(([{"corpus-id": "d0"}], ["d0"], None))]
    names = {"texts": texts, "pairs": pairs, "judgments": judgments}
    files = {name: {"files": {"train": [jsonl(tmp_path / f"{name}.jsonl", rows)]}} for name, rows in names.items()}
    task = {"kind": "retrieval", "train": {**files["pairs"], "negatives_column": "hard"},
            "corpus": {**files["texts"], "text_columns": ["text"]}, "queries": [files["texts"]],
            "qrels": {"test": {**files["judgments"], "list_column": "lists", "score_column": None}}}  # fmt: skip
    record = prepare_task("it", one_task(tmp_path, task, max_invalid_share=0.8))
    assert record["rows"] == {"train": 1, "queries": 1, "corpus": 1, "qrels/test": 1}
    reasons = {table: sorted(reason.partition(" (")[0] for reason in faults) for table, faults in record["left_out"].items()}
    assert reasons == {"train": [TYPE, "negatives_column 'hard' is not text but int"], "qrels/test": [TYPE, TYPE]}


def test_a_changed_folder_is_read_again(tmp_path: Path) -> None:
    # The datasets library identifies a folder by its last name and its card.
    for parent, count in (("a", 3), ("b", 5)):
        folder = tmp_path / parent / "same"
        write_split(folder / "default", "train", [{"x": str(at)} for at in range(count)], {"x": TEXT})
        card(folder, {"default": ["train"]})
        assert len(open_table(DatasetConfig(path=str(folder)), "train", [])) == count
    write_split(folder / "default", "train", [{"x": "new"}] * 7, {"x": TEXT})
    assert len(open_table(DatasetConfig(path=str(folder)), "train", [])) == 7


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"path": "nowhere/at-all", "files": None}, "nowhere/at-all, train: can't be read ("),
        ({"files": {"train": ["{tmp}/none.parquet"]}}, "{tmp}/none.parquet: there is no such file"),
        ({"files": {"train": ["{tmp}/damaged.parquet"]}}, "{tmp}/damaged.parquet: can't be read ("),
        ({"files": {"train": ["{tmp}/rows.txt"]}}, "{tmp}/rows.txt: expected files of one kind: .parquet, "),
        ({"files": {"train": ["{tmp}/packed.parquet.gz"]}}, "{tmp}/packed.parquet.gz: expected files of one kind: "),
        ({"files": {"train": ["{tmp}/empty.jsonl"]}}, "{tmp}/empty.jsonl: is empty (0 bytes)"),
        (
            {"files": {"train": ["{tmp}/rows.jsonl"]}},
            "{tmp}/rows.jsonl: has no column 'tokens' (it has: text); set tokens_column",
        ),
    ],
)
@pytest.mark.usefixtures("hub_is_offline")
def test_unreadable_sources_are_named(tmp_path: Path, source: dict[str, Any], says: str) -> None:
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "rows.txt").write_text("text\n")
    (tmp_path / "packed.parquet.gz").write_bytes(b"packed")
    (tmp_path / "empty.jsonl").touch()
    jsonl(tmp_path / "rows.jsonl", [{"text": "t"}])
    filled = json.loads(json.dumps(source).replace("{tmp}", str(tmp_path)))
    with pytest.raises(UserError) as caught:
        prepare_task("it", one_task(tmp_path, {**TOKENS, "source": filled, "splits": {"test": "train"}}))
    assert str(caught.value).startswith(says.replace("{tmp}", str(tmp_path)))
    assert len(str(caught.value).splitlines()) == 1
