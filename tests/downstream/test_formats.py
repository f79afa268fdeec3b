"""Datasets in the files in which they are published, on excerpts in exactly those forms."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from datasets import Dataset, DatasetDict, load_dataset

from biphasic.config.tasks import DatasetConfig
from biphasic.downstream import tables
from biphasic.downstream.labels import TagScheme
from biphasic.downstream.prepare import describe_record, prepare_task
from biphasic.errors import UserError
from helpers.downstream_sets import jsonl, one_task, rows_of

UNER = """# newdoc id = answers-20111108104724AAuBUR7_ans
# sent_id = answers-1
# text = Where is the Eiffel Tower in Paris ?
1\tWhere\tO\t-\t-
2\tis\tO\t-\t-
3\tthe\tO\t-\t-
4\tEiffel\tB-LOC\t-\t-
5\tTower\tI-LOC\t-\t-
6\tin\tO\t-\t-
7\tParis\tB-LOC\t-\t-
8\t?\tO\t-\t-

# sent_id = answers-2
# newdoc id = five-words
# text = # 1 for Ann
1\t#\tO\t-\t-
2\t1\tO\t-\t-
3\tfor\tO\t-\t-
4\tAnn\tB-PER\t-\t-
"""
CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC
call NN I-NP O
. . O O

-DOCSTART- -X- -X- O

# SYM B-NP O
Peter NNP I-NP B-PER
Blackburn NNP I-NP I-PER
"""
TOKENS = {"kind": "tokens", "labels_column": "labels"}
TEXT = {"kind": "classification", "text_column": "sentence", "label_names": ["negative", "positive"]}
ASK = {"kind": "question_answering"}


def prepared(tmp_path: Path, task: dict[str, Any], path: Path, **source: Any) -> tuple[dict[str, Any], Any]:
    """The record and the rows of a task with one file."""
    task = {**task, "source": {"files": {"all": [str(path)]}, **source}, "splits": {"test": "all"}}
    config = one_task(tmp_path, task)
    record = prepare_task("it", config)
    return record, rows_of(tmp_path / "out" / "it", "test")


def refused(tmp_path: Path, task: dict[str, Any], path: Path, **source: Any) -> str:
    """The message about a task with one file."""
    config = one_task(tmp_path, {**task, "source": {"files": {"all": [str(path)]}, **source}, "splits": {"test": "all"}})
    with pytest.raises(UserError) as error:
        prepare_task("it", config)
    return str(error.value)


@pytest.mark.parametrize("suffix", ["iob2", "conll.gz"])
def test_columns_as_in_uner(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"en.{suffix}"
    path.write_bytes(gzip.compress(UNER.encode()) if suffix.endswith("gz") else UNER.encode())
    record, rows = prepared(tmp_path, TOKENS, path)
    assert record["label_names"] == ["O", "B-LOC", "I-LOC", "B-PER"]
    assert [row["tokens"] for row in rows] == [
        ["Where", "is", "the", "Eiffel", "Tower", "in", "Paris", "?"],
        ["#", "1", "for", "Ann"],
    ]
    assert [row["labels"] for row in rows] == [[0, 0, 0, 1, 2, 0, 1, 0], [0, 0, 0, 3]]


def test_columns_as_in_conll(tmp_path: Path) -> None:
    path = tmp_path / "eng.conll"
    path.write_text(CONLL)
    record, rows = prepared(tmp_path, TOKENS, path)
    assert record["label_names"] == ["O", "B-MISC", "B-ORG", "B-PER", "I-PER"]
    assert rows[0]["tokens"] == ["EU", "rejects", "German", "call", "."]
    assert rows[1] == {"id": "all-1", "tokens": ["#", "Peter", "Blackburn"], "labels": [0, 3, 4]}
    # Another column, by its name.
    chunks = {**TOKENS, "labels_column": "chunk"}
    record, rows = prepared(tmp_path / "chunks", chunks, path, columns=["tokens", "pos", "chunk", "ner"])
    assert record["label_names"] == ["O", "B-NP", "I-NP", "B-VP"] and rows[1]["labels"] == [1, 2, 2]


def test_columns_as_in_multiconer(tmp_path: Path) -> None:
    """Its comments have tabs, and its words spaces."""
    path = tmp_path / "en.conll"
    path.write_text("# id 5239d808\tdomain=en\nthe _ _ O\nlouvre _ _ B-Facility\n\n# id 7\tdomain=en\n# _ _ O\n\n")
    _, read = prepared(tmp_path, {**TOKENS, "tokens_column": "tokens"}, path)
    assert [(row["tokens"], row["labels"]) for row in read] == [(["the", "louvre"], [0, 1]), (["#"], [0])]


def test_labels_of_all_splits_have_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.bio").write_text("Ann B-PER\nleft O\n\n" * 3)
    (tmp_path / "test.bio").write_text("Paris B-LOC\nburns O\n")
    files = {split: [str(tmp_path / f"{split}.bio")] for split in ("train", "test")}
    splits = {"train": "train", "validation": "train", "test": "test"}
    record = prepare_task("it", one_task(tmp_path, {**TOKENS, "source": {"files": files}, "splits": splits}))
    assert record["label_names"] == ["O", "B-LOC", "B-PER"]
    assert record["warnings"] == ["100% of validation also occurs in train: scores don't measure generalization"]


@pytest.mark.parametrize(
    ("labels", "bio"),
    [
        ("I-PER I-PER O I-LOC B-LOC I-ORG", "B-PER I-PER O B-LOC B-LOC B-ORG"),
        ("B-PER E-PER S-LOC O B-X I-X E-X", "B-PER I-PER B-LOC O B-X I-X I-X"),
        ("U-PER B-LOC L-LOC O", "B-PER B-LOC I-LOC O"),
        ("B-PER I-PER B-PER O", "B-PER I-PER B-PER O"),
    ],
)
def test_other_schemes_become_bio(labels: str, bio: str) -> None:
    assert TagScheme(labels.split(), "it").to_bio(labels.split()) == bio.split()


def test_a_line_with_another_number_of_columns_is_named(tmp_path: Path) -> None:
    path = tmp_path / "en.conll"
    path.write_text("Ann NNP B-PER\nleft VBD O\nParis B-LOC\n")
    assert refused(tmp_path, TOKENS, path) == (
        f"{path}:3: has 2 columns; expected 3 columns, as in the other lines: a word and its label in each line, such as "
        "`Paris B-LOC`, and a blank line after each sentence"
    )


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Normans",
            "paragraphs": [
                {
                    "context": "The Normans gave their name to Normandy.",
                    "qas": [
                        {"id": "a", "question": "What has their name?", "is_impossible": False,
                         "answers": [{"text": "Normandy", "answer_start": 31}] * 2},
                        {"id": "b", "question": "Who gave a name to Paris?", "is_impossible": True, "answers": [],
                         "plausible_answers": [{"text": "Normans", "answer_start": 4}]},
                    ],
                }
            ],
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_squad_s_own_file(tmp_path: Path, version: str) -> None:
    content: Any = json.loads(json.dumps(SQUAD))
    questions = content["data"][0]["paragraphs"][0]["qas"]
    if version == "1.1":
        del questions[1], questions[0]["is_impossible"]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    task = {**ASK, "id_column": "id"}
    _, rows = prepared(tmp_path, task, path)
    assert [row["id"] for row in rows] == ["a", "b"][: len(questions)]
    assert rows[0]["answers"] == {"text": ["Normandy"] * 2, "answer_start": [31] * 2}
    assert rows[0]["context"].startswith("The Normans")
    assert version == "1.1" or rows[1]["answers"] == {"text": [], "answer_start": []}
    del questions[0]["question"]
    path.write_text(json.dumps(content))
    assert refused(tmp_path / "lacks", task, path).startswith(f"{path}: question 1 lacks 'question'; expected {{\"data\":")


def test_questions_without_answers_are_warned_of(tmp_path: Path) -> None:
    content: Any = json.loads(json.dumps(SQUAD))
    del content["data"][0]["paragraphs"][0]["qas"][0]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(content))
    record, _ = prepared(tmp_path, ASK, path)
    assert record["warnings"] == ["no question of test has an answer: a model that never answers scores 1"]
    assert "\n  WARNING: no question of test has an answer" in describe_record("it", "out", record)


# As GLUE's: 3 of its lines begin with a quotation mark that nothing closes.
GLUE = [
    ("a fine film", 1),
    ('" this is a film', 0),
    ("dull", 0),
    ('"the best" of the year', 1),
    ('" so what', 0),
    ("gone", 0),
]


def test_tsv_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("".join(f"{text}\t{label}\n" for text, label in [("sentence", "label"), *GLUE]))
    _, rows = prepared(tmp_path, TEXT, path)
    assert [(row["text"], row["label"]) for row in rows] == GLUE
    quoted = path.rename(tmp_path / "train.csv")
    quoted.write_text('sentence,label\na,1\n"b,0\n')
    message = refused(tmp_path / "quoted", TEXT, quoted)
    assert message.startswith(f"{quoted}:3: a quotation mark in this line or after it is not closed (")
    assert message.endswith("; quotation marks are text in a .tsv file")


def test_csv_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('sentence,label\n"one, ""two""\nthree",1\nfour,0\n')
    _, rows = prepared(tmp_path, TEXT, path)
    assert [row["text"] for row in rows] == ['one, "two"\nthree', "four"]
    path.write_text('sentence,label\none, two,1\n"four",0\n')
    assert refused(tmp_path / "wide", TEXT, path).startswith(f"{path}:2: has 3 fields; expected 2, as before")
    path.write_text('sentence,label\nfour\n"four",0\n')
    assert refused(tmp_path / "narrow", TEXT, path).startswith(f"{path}:2: has 1 fields; expected 2, as before")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_file_with_another_separator_is_refused(tmp_path: Path, separator: str) -> None:
    """Also where commas in its texts make rows of another width."""
    path, header = tmp_path / "train.csv", f"sentence{separator}label"
    path.write_text(f"{header}\none, two{separator}1\n")
    expected = f"{path}:1: has one column, {header!r}; expected commas between the columns of a .csv file"
    assert refused(tmp_path, TEXT, path) == f"{expected}, found {separator!r}"
    path.write_text(f"{header}\none{separator}1\n")
    assert "expected commas" in refused(tmp_path, {**TEXT, "text_column": header}, path)
    # Without a header, a text may have any of these.
    path.write_text("a; b\n")
    topics = {**TEXT, "label_names": ["a; b"], "text_column": "label"}
    assert prepared(tmp_path, topics, path, columns=["label"])[1][0]["text"] == "a; b"


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_tables_without_a_header(tmp_path: Path, kind: str) -> None:
    """As AG News."""
    path, separator = tmp_path / f"dev.{kind}", "," if kind == "csv" else "\t"
    path.write_text(f"a fine film{separator}1\ndull{separator}0\n", encoding="utf-8-sig")
    record, rows = prepared(tmp_path, TEXT, path, columns=["sentence", "label"])
    assert [(row["text"], row["label"]) for row in rows] == [("a fine film", 1), ("dull", 0)]
    assert record["rows"] == {"test": 2}
    # Its labels are the numbers from 1 to 4, so a label is first of all a name.
    path.write_text(f"1{separator}007\n4{separator}8\n")
    topics = {**TEXT, "label_names": ["1", "2", "3", "4"], "id_column": "number", "text_column": "number"}
    _, rows = prepared(tmp_path / "topics", topics, path, columns=["label", "number"])
    assert [(row["id"], row["text"], row["label"]) for row in rows] == [("007", "007", 0), ("8", "8", 3)]
    path.write_text(f"0{separator}a\n")
    source = {"files": {"all": [str(path)]}, "columns": ["label", "number"]}
    from_zero = {**topics, "id_column": None, "source": source, "splits": {"test": "all"}}
    with pytest.raises(UserError, match="row 1: the label '0' is not one of 1, 2, 3, 4"):
        prepare_task("it", one_task(tmp_path / "from 0", from_zero))


@pytest.mark.parametrize("header", [["sentence", "label"], ["Label", "Sentence"]])
@pytest.mark.parametrize("kind", ["csv", "tsv", "conll"])
def test_names_for_a_file_with_a_header_are_refused(tmp_path: Path, kind: str, header: list[str]) -> None:
    path = tmp_path / f"rows.{kind}"
    start = {"csv": "", "tsv": "\n", "conll": ""}[kind]  # a blank line isn't the first row
    lines = [{"csv": ",", "tsv": "\t", "conll": " "}[kind].join(row) for row in (header, ["a", "1"])]
    path.write_text(start + "\n".join(lines) + "\n")
    task = {**TOKENS, "labels_column": "label", "tokens_column": "sentence"} if kind == "conll" else TEXT
    expected = f"{path}: the first row names the columns: expected no source.columns, or a file without this row"
    assert refused(tmp_path, task, path, columns=["sentence", "label"]) == expected


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_files_with_other_columns_are_refused(tmp_path: Path, kind: str) -> None:
    """Unless the column isn't used, also where both files fit in one block of rows."""
    separator = "," if kind == "csv" else "\t"
    for name, header, row in (("a", "sentence,label,x", "t,1,y"), ("b", "uid,sentence,label", "u,t,0")):
        lines = "\n".join([header, *[row] * 600]).replace(",", separator)
        (tmp_path / f"{name}.{kind}").write_text(lines + "\n")
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    task = {**TEXT, "id_column": "uid"}
    for files, problem in (([first, second], "has a"), ([second, first], "has no")):
        source = {"files": {"all": list(map(str, files))}}
        with pytest.raises(UserError) as error:
            prepare_task("it", one_task(tmp_path, {**task, "source": source, "splits": {"test": "all"}}))
        expected = f"{files[1]}: {problem} column 'uid', unlike {files[0]}: expected the same columns in all files"
        assert str(error.value) == expected
    _, rows = prepared(tmp_path, TEXT, tmp_path / f"*.{kind}")
    assert [row["label"] for row in rows] == [1] * 600 + [0] * 600


def test_columns_have_no_effect_elsewhere(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"sentence": "t", "label": 0}])
    assert "columns has no effect on files of this kind" in refused(tmp_path, TEXT, Path(path), columns=["a"])


@pytest.mark.parametrize("kind", ["jsonl", "json", "list", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("texts", [["2020-01-01", "2020-01-02T00:00:00Z"], ["007", "1e5"], ["12:30", "true"]])
def test_texts_that_look_like_other_types_are_unchanged(tmp_path: Path, kind: str, texts: list[str]) -> None:
    rows = [{"number": text, "sentence": text, "label": 1} for text in texts]
    path = tmp_path / f"rows.{kind.replace('list', 'json')}"
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "list":
        path.write_text(json.dumps(rows, indent=1))
    elif kind.startswith("json"):
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8-sig")
    else:
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("".join(("," if kind == "csv" else "\t").join(map(str, line)) + "\n" for line in lines))
    _, read = prepared(tmp_path, {**TEXT, "id_column": "number"}, path)
    assert [(row["id"], row["text"], row["label"]) for row in read] == [(text, text, 1) for text in texts]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
def test_texts_in_a_folder_of_json_are_unchanged(tmp_path: Path, suffix: str) -> None:
    """A folder in the hub's layout, whose lines differ in their types; with and without `files`."""
    rows = [{"sentence": "2020-01-01", "label": "0"}, {"sentence": "2020-01-02", "label": 1}]
    (tmp_path / "set").mkdir()
    for split, count in (("train", 1), ("test", 2)):
        content = "".join(json.dumps(row) + "\n" for row in rows[:count]).encode()
        content = gzip.compress(content) if suffix.endswith("gz") else content
        (tmp_path / "set" / f"{split}.{suffix}").write_bytes(content)
    for name, files in (("all", None), ("one", {"test": [f"te*.{suffix}"]})):
        task = {**TEXT, "source": {"path": str(tmp_path / "set"), "files": files}, "splits": {"test": "test"}}
        config = one_task(tmp_path / name, task)
        prepare_task("it", config)
        read = rows_of(tmp_path / name / "out" / "it", "test")
        assert [(row["text"], row["label"]) for row in read] == [("2020-01-01", 0), ("2020-01-02", 1)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("declared", [None, "string", "class_label"])
def test_texts_in_a_folder_are_those_of_its_files(tmp_path: Path, kind: str, declared: str | None) -> None:
    """A folder that is read by `path`, whose card may declare the columns; also after another program has read it."""
    texts = {"csv": ["NA", "007", "null"], "tsv": ["NA", "007", '"open'], "jsonl": ["2020-01-01", "2020-01-02"]}[kind]
    rows = [{"number": text, "sentence": text, "label": ["negative", "positive"][at % 2]} for at, text in enumerate(texts)]
    folder = tmp_path / "set"
    folder.mkdir()
    if kind == "jsonl":
        jsonl(folder / "test.jsonl", rows)
    else:
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        (folder / f"test.{kind}").write_text("".join(("," if kind == "csv" else "\t").join(line) + "\n" for line in lines))
    if declared is not None:
        label = "string" if declared == "string" else "\n      class_label:\n        names: {'0': positive, '1': negative}"
        columns = [("number", "string"), ("sentence", "string"), ("label", label)]
        features = "".join(f"\n  - name: {name}\n    dtype: {kind}" for name, kind in columns)
        (folder / "README.md").write_text(f"---\ndataset_info:\n  features:{features}\n---\n")
    load_dataset(str(folder), split="test", cache_dir=tables._cache_folder(folder))
    given = None if declared == "class_label" else TEXT["label_names"]
    task = {**TEXT, "label_names": given, "id_column": "number", "source": {"path": str(folder)}, "splits": {"test": "test"}}
    names = prepare_task("it", one_task(tmp_path, task))["label_names"]
    assert names == (["positive", "negative"] if declared == "class_label" else ["negative", "positive"])
    read = [(row["id"], row["text"], names[row["label"]]) for row in rows_of(tmp_path / "out" / "it", "test")]
    assert read == [(row["number"], row["sentence"], row["label"]) for row in rows]


def test_a_card_s_separator_and_its_other_settings(tmp_path: Path) -> None:
    """The separator holds for the own reader; a card that says more needs the library's."""
    config = "configs:\n- config_name: default\n  data_files: [{split: test, path: te.csv}]\n  sep: ';'"
    for more, text in (("", "NA"), ("\n  skiprows: 1", None)):
        (tmp_path / "README.md").write_text(f"---\n{config}{more}\n---\n")
        (tmp_path / "te.csv").write_text("skipped\n" * bool(more) + "sentence;label\nNA;1\na, b;0\n")
        table = tables.open_table(DatasetConfig(path=str(tmp_path)), "test", ["sentence"])
        assert table.rows["sentence"] == [text, "a, b"]


def test_labels_that_a_card_names_may_be_numbers_or_faulty(tmp_path: Path) -> None:
    """`1.0` is a number from a column with gaps; a row with another text is left out, and not the whole set."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "test.csv").write_text("sentence,label,score\n" + "a,1.0,NA\n" + "b,negative,2\n" * 1200 + "c,neutral,0.5\n")
    label = "\n  - name: label\n    dtype:\n      class_label:\n        names: {'0': negative, '1': positive}"
    columns = "".join(
        f"\n  - {{name: {name}, dtype: {kind}}}" for name, kind in (("sentence", "string"), ("score", "float64"))
    )
    (folder / "README.md").write_text(f"---\ndataset_info:\n  features:{columns}{label}\n---\n")
    task = {**TEXT, "label_names": None, "source": {"path": str(folder)}, "splits": {"test": "test"}}
    record = prepare_task("it", one_task(tmp_path, task))
    read = [(row["text"], row["label"]) for row in rows_of(tmp_path / "out" / "it", "test")]
    assert read == [("a", 1), *[("b", 0)] * 1200] and record["label_names"] == ["negative", "positive"]
    assert sum(record["left_out"]["test"].values()) == 1


def test_lines_of_json_may_differ(tmp_path: Path) -> None:
    """Rows may lack a key, and values of a key may have different types: only the rows with a fault are left out."""
    rows = [
        {"sentence": "a", "label": "positive"},
        {"sentence": 2, "label": 0},
        {"label": 1},
        {"sentence": "b", "label": 0},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"sentence": "c", "label": 1, "more": {"x": 1}}]))
    task = {**TEXT, "source": {"files": {"all": [str(path)]}}, "splits": {"test": "all"}}
    record = prepare_task("it", one_task(tmp_path, task, max_invalid_share=0.5))
    assert record["left_out"] == {
        "test": {"text_column 'sentence' is not text but int": 1, "text_column 'sentence' is empty": 1}
    }
    assert [(row["text"], row["label"]) for row in rows_of(tmp_path / "out" / "it", "test")] == [
        ("a", 1),
        ("b", 0),
        ("c", 1),
    ]
    for line in ('{"sentence": "cut', '["sentence"]'):
        path.write_text(json.dumps(rows[0]) + "\n" + line + "\n")
        message = refused(tmp_path / "cut", TEXT, path)
        assert message.startswith(f"{path}: can't be read: expected a JSON object in each line (")
        assert message.endswith(f": {line}")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "json.gz"])
def test_halves_of_surrogate_pairs_and_a_byte_order_mark(tmp_path: Path, suffix: str) -> None:
    rows = '{"sentence": "a \\ud83d b", "label": 1}\n', '{"sentence": "a \\ud83d\\ude00", "label": 0}\n'
    content = ("[" + ",".join(rows) + "]" if suffix.startswith("json") and "l" not in suffix else "".join(rows)).encode()
    path = tmp_path / f"rows.{suffix}"
    content = b"\xef\xbb\xbf" + content
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    _, read = prepared(tmp_path, TEXT, path)
    assert [row["text"] for row in read] == ["a ? b", "a \U0001f600"]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz", "csv.gz", "conll.gz", "jsonl.zst", "csv.zst", "conll.zst"])
def test_an_archive_that_is_cut_short(tmp_path: Path, suffix: str) -> None:
    kind = suffix.partition(".")[0]
    lines = [json.dumps({"sentence": f"text {number**3}", "label": number % 2}) for number in range(500)]
    if kind == "csv":
        lines = ["sentence,label", *(f"text {number**3},{number % 2}" for number in range(500))]
    elif kind == "conll":
        lines = [f"word{number**3} O" for number in range(500)]
    text = ("[" + ",".join(lines) + "]" if kind == "json" else "\n".join(lines)).encode()
    packed = (gzip.compress if suffix.endswith("gz") else zstandard.compress)(text)
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    task = {**TOKENS, "tokens_column": "tokens"} if kind == "conll" else TEXT
    source = {"source": {"files": {"all": [str(path)]}}, "splits": {"test": "all"}}
    with pytest.raises(UserError, match=r"rows\..*: can't be read"):
        prepare_task("it", one_task(tmp_path, {**task, **source}))


def test_a_file_that_two_patterns_match_is_read_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", [{"sentence": name, "label": 0}])
    patterns = [f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/./a.jsonl"]
    task = {**TEXT, "source": {"files": {"all": patterns}}, "splits": {"test": "all"}}
    prepare_task("it", one_task(tmp_path, task))
    assert [row["text"] for row in rows_of(tmp_path / "out" / "it", "test")] == ["b", "a"]


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    rows = [{"sentence": f"text {number}", "label": number % 2} for number in range(40)]
    DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:5])).save_to_disk(tmp_path / "saved")
    task = {**TEXT, "source": {"path": str(tmp_path / "saved")}, "splits": {"train": "train", "test": "test"}}
    config = one_task(tmp_path, task)
    record = prepare_task("it", config)
    assert record["rows"] == {"validation": 2, "train": 38, "test": 5}
    assert record["warnings"][-1].endswith("of test also occurs in train: scores don't measure generalization")


def write_beir(folder: Path) -> dict[str, Any]:
    """BEIR's layout, with queries of two splits, and a document that was judged and is not relevant."""
    (folder / "qrels").mkdir(parents=True)
    jsonl(
        folder / "corpus.jsonl",
        [{"_id": f"d{n}", "title": f"T{n}", "text": f"text {n}", "metadata": {}} for n in range(6)],
    )
    jsonl(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"query {n}", "metadata": {}} for n in range(5)])
    lines = ["query-id\tcorpus-id\tscore", "q0\td0\t1", "q1\td1\t2", "q1\td2\t0", "q2\td3\t0"]
    (folder / "qrels" / "test.tsv").write_text("\n".join([*lines, ""]))
    return {
        "kind": "retrieval",
        "corpus": {"files": [str(folder / "corpus.jsonl")], "text_columns": ["title", "text"]},
        "queries": [{"files": [str(folder / "queries.jsonl")]}],
        "qrels": {"test": {"files": [str(folder / "qrels" / "test.tsv")]}},
    }


def test_two_grades_of_a_document_are_refused(tmp_path: Path) -> None:
    """Also where one of them is below `min_score`; equal ones stay."""
    task = write_beir(tmp_path / "beir")
    qrels = tmp_path / "beir" / "qrels" / "test.tsv"
    lines = qrels.read_text()
    qrels.write_text(f"{lines}q1\td1\t2.0\n")
    assert prepare_task("it", one_task(tmp_path, task))["rows"]["qrels/test"] == 3
    for again in ("q1\td1\t1", "q1\td2\t1"):
        qrels.write_text(f"{lines}{again}\n")
        query, document, _ = again.split("\t")
        problem = f"judges document {document} for query {query} twice, with different grades"
        with pytest.raises(UserError, match=f"test.tsv: {problem}$"):
            prepare_task("it", one_task(tmp_path / document, task))


def test_a_beir_folder_and_what_it_leaves_out(tmp_path: Path) -> None:
    """A query without a judgment is usually one of another split."""
    config = one_task(tmp_path, write_beir(tmp_path / "beir"))
    record = prepare_task("it", config)
    assert record["rows"] == {"queries": 2, "corpus": 4, "qrels/test": 2}
    assert record["left_out"] == {}
    assert record["not_used"] == {
        "queries": {"no document is relevant to it": 1, "no judgment in these splits": 2},
        "corpus": {"no judgment in these splits (judged_only)": 2},
        "qrels/test": {"its score is below min_score (1)": 2},
    }
    line = describe_record("it", "out", record)
    assert "; not used: 1 of queries (no document is relevant to it), 2 of queries (no judgment in these splits), " in line
