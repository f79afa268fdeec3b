"""Local retrieval sets: every layout that is read, everything that is refused, and judged documents."""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from biphasic.errors import UserError
from biphasic.evaluation.scoring import bm25, score
from biphasic.evaluation.sets import LocalRetrieval, judged_only, read_set, retrieval_task
from biphasic.evaluation.tasks import _load
from helpers.toy_sets import make_sets

Rows = list[dict[str, Any]]
CORPUS: Rows = [
    {"_id": "d1", "title": "Ähren", "text": "grün 😀 „Korn“"},
    {"_id": "d2", "title": "", "text": 'a "quoted" one\twith a tab\nand a line'},
    {"_id": "d3", "title": "Third", "text": "nobody judges it"},
]
QUERIES: Rows = [{"_id": "q1", "text": "Où ?"}, {"_id": "q2", "text": "二"}]
QRELS: Rows = [
    {"query-id": "q1", "corpus-id": "d1", "score": 2},
    {"query-id": "q2", "corpus-id": "d2", "score": 1},
    {"query-id": "q2", "corpus-id": "d1", "score": 0},
]


def jsonl(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def parquet(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), file)


def tsv(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    file.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")


def write_set(folder: Path, corpus: Rows = CORPUS, queries: Rows = QUERIES, qrels: Rows = QRELS) -> Path:
    """Write the layout of BEIR's archives."""
    jsonl(folder / "corpus.jsonl", corpus)
    jsonl(folder / "queries.jsonl", queries)
    if qrels:
        tsv(folder / "qrels" / "test.tsv", qrels)
    return folder


def read(folder: Path, only: Sequence[str] | None = None) -> LocalRetrieval:
    task = read_set(str(folder), "my-set", "eng-Latn", only)
    task.load_data()
    return task


def split_of(task: Any, split: str = "test", subset: str = "default") -> dict[str, Any]:
    """Return documents (title, text), queries and judgments, by id."""
    data = task.dataset[subset][split]
    documents = {row["id"]: (row.get("title"), row["text"]) for row in data["corpus"]}
    queries = {row["id"]: row["text"] for row in data["queries"]}
    return {"documents": documents, "queries": queries, "qrels": data["relevant_docs"]}


EXPECTED = {
    "documents": {row["_id"]: (row["title"], row["text"]) for row in CORPUS},
    "queries": {"q1": "Où ?", "q2": "二"},
    "qrels": {"q1": {"d1": 2}, "q2": {"d2": 1, "d1": 0}},
}


def beir(folder: Path) -> None:
    write_set(folder)


def all_parquet(folder: Path) -> None:
    parquet(folder / "corpus.parquet", CORPUS)
    parquet(folder / "queries.parquet", QUERIES)
    parquet(folder / "qrels" / "test.parquet", QRELS)


def several_files(folder: Path) -> None:
    for number, row in enumerate(CORPUS):
        parquet(folder / "corpus" / f"corpus-{number:05d}.parquet", [row])
    for number, row in enumerate(QUERIES):
        jsonl(folder / "queries" / f"{number}.jsonl", [row])
    for name in ("README.md", "_part.jsonl", "._corpus-00000.parquet"):
        (folder / "corpus" / name).write_text("not data")
    jsonl(folder / "qrels" / "test.jsonl", QRELS)


def one_file_of_judgments(folder: Path) -> None:
    write_set(folder, qrels=[])
    jsonl(folder / "qrels.jsonl", QRELS)


@pytest.mark.parametrize("write", [beir, all_parquet, several_files, one_file_of_judgments])
def test_every_layout_gives_the_same_task(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "my-set")
    task = read(tmp_path / "my-set")
    assert split_of(task) == EXPECTED
    assert list(task.dataset["default"]) == ["test"] == task.metadata.eval_splits
    assert (task.metadata.name, task.metadata.eval_langs) == ("my-set", ["eng-Latn"])


def test_a_folder_whose_name_has_brackets(tmp_path: Path) -> None:
    assert split_of(read(write_set(tmp_path / "my[set]*"))) == EXPECTED


def test_an_empty_text_in_tsv_is_a_text(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "my-set")
    (folder / "corpus.jsonl").unlink()
    tsv(folder / "corpus.tsv", [{"_id": "d1", "title": "T", "text": ""}, {"_id": "d2", "title": "", "text": "x"}])
    assert split_of(read(folder))["documents"] == {"d1": ("T", ""), "d2": ("", "x")}


def test_all_splits_or_some(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "my-set", qrels=QRELS[:1])
    tsv(folder / "qrels" / "dev.tsv", QRELS[1:])
    both = read(folder)
    assert split_of(both)["qrels"] == {"q1": {"d1": 2}} and split_of(both)["queries"] == {"q1": "Où ?"}
    assert split_of(both, "dev")["qrels"] == {"q2": {"d2": 1, "d1": 0}} and split_of(both, "dev")["queries"] == {"q2": "二"}
    assert both.metadata.eval_splits == ["dev", "test"]
    one = read(folder, ["dev"])
    assert list(one.dataset["default"]) == ["dev"] == one.metadata.eval_splits
    assert split_of(one, "dev") == split_of(both, "dev")
    with pytest.raises(UserError, match=r"my-set: has no split train \(it has: dev, test\)"):
        read(folder, ["dev", "train"])


def test_numbers_as_ids_are_read_as_text(tmp_path: Path) -> None:
    documents = [{"_id": number, "text": f"t{number}"} for number in (7, 12)]
    judged = [{"query-id": 3, "corpus-id": 7, "score": 1}]
    task = read(write_set(tmp_path / "my-set", documents, [{"_id": 3, "text": "q"}], judged))
    assert split_of(task) == {"documents": {"7": ("", "t7"), "12": ("", "t12")}, "queries": {"3": "q"},
                              "qrels": {"3": {"7": 1}}}  # fmt: skip


@pytest.mark.parametrize(
    "ids", [["007", "7"], ["1e5", "100000"], ["NA", "null"], ["2020-01-01", "2020-01-02"], ['"x"', "x"]]
)
def test_texts_that_look_like_other_types_are_unchanged(ids: list[str], tmp_path: Path) -> None:
    """Numbers with zeros, missing values, dates, quotes; also as texts and titles."""
    documents = [{"_id": id, "title": id, "text": id} for id in ids]
    judged = [{"query-id": id, "corpus-id": id, "score": 1} for id in ids]
    expected = {
        "documents": {id: (id, id) for id in ids},
        "queries": {id: id for id in ids},
        "qrels": {id: {id: 1} for id in ids},
    }
    folder = write_set(tmp_path / "tsv", documents, [{"_id": id, "text": id} for id in ids], judged)
    assert split_of(read(folder)) == expected
    (folder / "qrels" / "test.tsv").unlink()
    jsonl(folder / "qrels" / "test.jsonl", judged)
    assert split_of(read(folder)) == expected


def test_missing_titles_are_empty(tmp_path: Path) -> None:
    """Null, or missing in some lines, some files, or all."""
    rows = [
        {"_id": "d1", "title": None, "text": "a"},
        {"_id": "d2", "text": "b"},
        {"_id": "d3", "title": "T", "text": "c"},
    ]
    some = read(write_set(tmp_path / "some", rows))
    assert split_of(some)["documents"] == {"d1": ("", "a"), "d2": ("", "b"), "d3": ("T", "c")}
    none = read(write_set(tmp_path / "none", rows[:2]))
    assert split_of(none)["documents"] == {"d1": ("", "a"), "d2": ("", "b")}
    folder = write_set(tmp_path / "files", rows)
    (folder / "corpus.jsonl").unlink()
    jsonl(folder / "corpus" / "a.jsonl", rows[1:2])
    parquet(folder / "corpus" / "b.parquet", rows[2:])
    parquet(folder / "corpus" / "c.parquet", rows[:1])
    assert split_of(read(folder))["documents"] == {"d1": ("", "a"), "d2": ("", "b"), "d3": ("T", "c")}


@pytest.mark.parametrize("score", [True, 1e39, 2**40, 0.5])
def test_grades_that_are_no_whole_numbers_of_32_bits(tmp_path: Path, score: Any) -> None:
    folder = write_set(tmp_path / "set")
    jsonl(folder / "qrels" / "test.jsonl", [{**row, "score": score} for row in QRELS])
    (folder / "qrels" / "test.tsv").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"test.jsonl: can't be read .score: .* is not a"):
        read_set(str(folder), "set", "eng-Latn")


def test_a_long_line_and_integer_grades_in_floats(tmp_path: Path) -> None:
    long = "wörter " * 400_000
    folder = write_set(tmp_path / "my-set", [{"_id": "d1", "text": long}, {"_id": "d2", "text": "b"}], qrels=[])
    assert (folder / "corpus.jsonl").stat().st_size > 3 << 20
    jsonl(folder / "qrels" / "test.jsonl", [{**row, "score": float(row["score"])} for row in QRELS])
    content = split_of(read(folder))
    assert content["documents"]["d1"] == ("", long)
    assert content["qrels"] == EXPECTED["qrels"]
    assert all(isinstance(grade, int) for grades in content["qrels"].values() for grade in grades.values())


def test_judgments_of_missing_documents_are_kept(tmp_path: Path) -> None:
    """As in BEIR: they can't be found, but count in the ideal ranking."""
    more = [*QRELS, {"query-id": "q1", "corpus-id": "gone", "score": 1}, QRELS[0]]
    assert split_of(read(write_set(tmp_path / "my-set", qrels=more)))["qrels"]["q1"] == {"d1": 2, "gone": 1}


def test_a_set_of_the_tasks_command(tmp_path: Path) -> None:
    folder = make_sets(tmp_path, {"train": 4, "validation": 5, "test": 6}) / "msmarco"
    task = read(folder)
    for split, count in (("validation", 10), ("test", 12)):
        content = split_of(task, split)
        assert len(content["documents"]) == 22
        assert content["qrels"] == {f"{split}{at}": {f"{split}{at}": 1} for at in range(count)}
        assert list(content["queries"]) == list(content["qrels"])
        assert all(re.fullmatch(r"(w\d+ ?){4}", text) for text in content["queries"].values())


def broken(corpus: Rows = CORPUS, queries: Rows = QUERIES, qrels: Rows = QRELS) -> Callable[[Path], Any]:
    return lambda folder: write_set(folder, corpus, queries, qrels)


def emptied(name: str) -> Callable[[Path], Any]:
    return lambda folder: (write_set(folder) / name).write_bytes(b"")


def no_rows(folder: Path) -> None:
    (write_set(folder) / "corpus.jsonl").unlink()
    schema = pa.schema([("_id", pa.string()), ("text", pa.string())])
    pa.parquet.write_table(schema.empty_table(), folder / "corpus.parquet")


def broken_line(folder: Path) -> None:
    with (write_set(folder) / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d4", "text": "cut o')


def cut_parquet(folder: Path) -> None:
    all_parquet(folder)
    file = folder / "corpus.parquet"
    file.write_bytes(file.read_bytes()[:-20])


def not_utf8(folder: Path) -> None:
    (write_set(folder) / "corpus.jsonl").write_bytes('{"_id": "d1", "text": "grün"}\n'.encode("latin-1"))


def judged(*rows: tuple[Any, Any, Any]) -> Rows:
    return [*QRELS, *({"query-id": query, "corpus-id": document, "score": score} for query, document, score in rows)]


UNJUDGED = {"_id": "q9", "text": "?"}
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: None, r"set .*/my-set: has no corpus"),
    "no corpus": (
        lambda folder: (write_set(folder) / "corpus.jsonl").unlink(),
        r"/my-set: has no corpus \(corpus\.jsonl",
    ),
    "no queries": (lambda folder: (write_set(folder) / "queries.jsonl").unlink(), r"/my-set: has no queries \("),
    "no qrels": (broken(qrels=[]), r"/my-set: has no qrels \(qrels\.jsonl, .*, or a folder qrels of"),
    "corpus of 0 bytes": (emptied("corpus.jsonl"), r"/my-set/corpus\.jsonl: is empty \(0 bytes\)"),
    "corpus of 0 rows": (no_rows, r"/my-set/corpus\.parquet: has no rows$"),
    "qrels of 0 bytes": (emptied("qrels/test.tsv"), r"/my-set/qrels/test\.tsv: is empty \(0 bytes\)"),
    "qrels of 0 rows": (
        lambda folder: (write_set(folder) / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n"),
        r"/my-set/qrels/test\.tsv: has no rows",
    ),
    "query without qrels": (
        broken(queries=[*QUERIES, UNJUDGED]),
        r"my-set: 1 queries have no judgments \(qrels\).* q9$",
    ),
    "qrels for an unknown query": (
        broken(qrels=judged(("q8", "d1", 1))),
        r"my-set: 1 judged queries are missing.* q8$",
    ),
    "document twice": (broken([*CORPUS, CORPUS[1]]), r"my-set: the corpus has an id twice, e\.g\. d2$"),
    "query twice": (broken(queries=[*QUERIES, QUERIES[0]]), r"my-set: the queries have an id twice, e\.g\. q1$"),
    "nothing relevant": (
        broken(queries=[*QUERIES, UNJUDGED], qrels=judged(("q9", "d1", 0), ("q9", "gone", 1))),
        r"my-set: 1 queries have no relevant document in the corpus, e\.g\. q9$",
    ),
    "missing column": (
        broken([{"id": "d1", "text": "a"}]),
        r"/my-set/corpus\.jsonl: has no column '_id' \(it has: id, text\)",
    ),
    "missing column of qrels": (
        broken(qrels=[{"query-id": "q1", "corpus-id": "d1"}]),
        r"/my-set/qrels/test\.tsv: has no column 'score'",
    ),
    "null text": (
        broken([*CORPUS, {"_id": "d4", "text": None}]),
        r"column `text` of .*/my-set/corpus\.jsonl has 1 rows without",
    ),
    "null id": (
        broken(queries=[*QUERIES, {"_id": None, "text": "?"}]),
        r"column `_id` of .*/my-set/queries\.jsonl has 1 rows",
    ),
    "numbers for texts": (
        broken([{"_id": "d1", "text": 1}, {"_id": "d2", "text": 2}]),
        r"/my-set/corpus\.jsonl: can't be read \(Expected .*got .*'int'",
    ),
    "fractions for ids": (
        broken([{"_id": 1.5, "text": "a"}]),
        r"/my-set/corpus\.jsonl: can't be read \(Expected .*got .*'float'",
    ),
    "half a grade in TSV": (
        broken(qrels=judged(("q1", "d2", 1.5))),
        r"/my-set/qrels/test\.tsv: can't be read \(.*1\.5",
    ),
    "a word for a grade in TSV": (broken(qrels=judged(("q1", "d2", "yes"))), r"/my-set/qrels/test\.tsv: can't be.*yes"),
    "half a grade in JSON": (
        lambda folder: jsonl(write_set(folder, qrels=[]) / "qrels.jsonl", judged(("q1", "d2", 1.5))),
        r"/my-set/qrels\.jsonl: can't be read \(.*1\.5",
    ),
    "a word for a grade in JSON": (
        lambda folder: jsonl(
            write_set(folder, qrels=[]) / "qrels.jsonl", [{"query-id": "q1", "corpus-id": "d1", "score": "yes"}]
        ),
        r"/my-set/qrels\.jsonl: can't be read \(.*yes",
    ),
    "broken line": (broken_line, r"/my-set/corpus\.jsonl: can't be read: expected a JSON object in each line .*cut o$"),
    "truncated Parquet": (cut_parquet, r"/my-set/corpus\.parquet: can't be read \("),
    "not UTF-8": (not_utf8, r"/my-set/corpus\.jsonl: can't be read \("),
    "contradiction": (
        broken(qrels=judged(("q1", "d1", 1))),
        r"/my-set/qrels/test\.tsv: judges document d1 for query q1 twice, with different grades",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sets_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    write, message = BAD[case]
    write(tmp_path / "my-set")
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / "my-set")
    assert "\n" not in str(caught.value)


def task_of(qrels: Mapping[str, Any]) -> LocalRetrieval:
    documents = {f"d{at}": f"text {at}" for at in range(8)}
    task = retrieval_task("Made", documents, {"q1": "one", "q2": "two"}, qrels)
    task.load_data()
    return task


def test_judged_documents_of_all_splits() -> None:
    """Relevant or not; judged documents that aren't in the corpus are ignored."""
    task = task_of({"dev": {"q1": {"d6": 1, "d4": 0, "gone": 1}}, "test": {"q2": {"d1": 2}}})
    before = copy.deepcopy({split: split_of(task, split) for split in ("dev", "test")})
    judged = judged_only(task)
    judged.load_data()
    assert (judged.metadata.name, judged.metadata.eval_splits) == ("Made-judged", ["dev", "test"])
    for split in ("dev", "test"):
        content = split_of(judged, split)
        assert content["documents"] == {f"d{at}": (None, f"text {at}") for at in (1, 4, 6)}
        assert (content["queries"], content["qrels"]) == (before[split]["queries"], before[split]["qrels"])
    assert {split: split_of(task, split) for split in ("dev", "test")} == before
    assert task.metadata.name == "Made"


def test_a_task_of_mteb_s_first_form_is_converted() -> None:
    """Its texts are attributes until mteb converts them, which it does only when it scores."""
    made = task_of({"test": {"q1": {"d1": 1}, "q2": {"d2": 1}}})

    class OfTheFirstForm(type(made)):
        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            self.corpus = {"test": {f"d{at}": {"text": f"text {at}"} for at in range(8)}}
            self.queries = {"test": {"q1": "one", "q2": "two"}}
            self.relevant_docs = {"test": {"q1": {"d1": 1}, "q2": {"d2": 1}}}
            self.data_loaded = True

    task = copy.copy(made)
    task.__class__ = OfTheFirstForm
    task.dataset = None
    judged = judged_only(_load(task))
    judged.load_data()
    assert list(split_of(judged, "test")["documents"]) == ["d1", "d2"]


def test_judged_documents_of_each_subset() -> None:
    """A language's judgments keep no document of another's corpus, and candidates for reranking are filtered too."""
    german, english = (
        task_of({"test": {"q1": {"d1": 1}, "q2": {"d2": 1}}}),
        task_of({"test": {"q1": {"d5": 1}, "q2": {"d7": 0, "d5": 1}}}),
    )
    both = task_of({"test": {"q1": {"d1": 1}, "q2": {"d2": 1}}})
    both.metadata = both.metadata.model_copy(
        update={"type": "Reranking", "eval_langs": {"de": ["deu-Latn"], "en": ["eng-Latn"], "fr": ["fra-Latn"]}}
    )
    both.dataset = {"de": german.dataset["default"], "en": english.dataset["default"]}
    both.dataset["en"]["test"]["top_ranked"] = {"q1": ["d3", "d5"], "q2": ["d7", "d0", "d5"]}
    judged = judged_only(both)
    judged.load_data()
    assert list(split_of(judged, subset="de")["documents"]) == ["d1", "d2"]
    assert list(split_of(judged, subset="en")["documents"]) == ["d5", "d7"]
    assert judged.dataset["de"]["test"]["top_ranked"] is None
    assert judged.dataset["en"]["test"]["top_ranked"] == {"q1": ["d5"], "q2": ["d7", "d5"]}
    assert both.dataset["en"]["test"]["top_ranked"] == {"q1": ["d3", "d5"], "q2": ["d7", "d0", "d5"]}
    assert judged.metadata.eval_langs == {"de": ["deu-Latn"], "en": ["eng-Latn"]}
    assert judged.metadata.type == "Reranking"  # prompts may depend on it


def test_a_script_that_is_not_the_languages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """mteb's BM25 has characters as Japanese words, and takes a sentence without spaces for one word in English."""
    texts = ["東京は日本の首都です", "大阪は西日本の都市です", "猫と犬"]
    corpus = [{"_id": f"d{number}", "text": text} for number, text in enumerate(texts)]
    queries = [{"_id": "q", "text": "日本の首都名 Tokyo"}]
    qrels = [{"query-id": "q", "corpus-id": "d0", "score": 1}]
    folder = write_set(tmp_path / "set", corpus, queries, qrels)
    ours = "biphasic.evaluation.sets"
    for language, found, warnings in (("eng-Latn", set(), 1), ("jpn-Jpan", {"d0", "d1"}, 0)):
        [row] = score(bm25(), read_set(str(folder), "set", language))[0]
        assert {document for document, value in row.ranking["q"] if value > 0} == found
        messages = [record.getMessage() for record in caplog.records if record.name == ours]
        assert len(messages) == warnings
        assert all("is eng-Latn, but most letters of its queries are not Latin" in message for message in messages)
        caplog.clear()
    queries[0]["text"] = "Tokyo, the capital of 日本?"
    read_set(str(write_set(tmp_path / "set", corpus, queries, qrels)), "set", "eng-Latn")
    assert not [record for record in caplog.records if record.name == ours]
