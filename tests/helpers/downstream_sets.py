"""Small sets with exactly the columns that the hub's have."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from biphasic.config.tasks import TasksConfig

TEXT, NUMBER = Value("string"), Value("int32")
ANSWERS = {"text": Sequence(TEXT), "answer_start": Sequence(NUMBER)}
ROWS = 40


def write_split(folder: Path, name: str, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
    """A split as the hub's libraries write it: Parquet, with the features in its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, Features(features)).to_parquet(folder / f"{name}.parquet")


def card(folder: Path, configurations: dict[str, list[str]]) -> Path:
    """The card that tells a dataset's configurations, each in a folder of its own."""
    lines = ["---", "configs:"]
    for name, splits in configurations.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {name}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


GLUE = {
    "cola": ["sentence"], "sst2": ["sentence"], "mrpc": ["sentence1", "sentence2"], "stsb": ["sentence1", "sentence2"],
    "qqp": ["question1", "question2"], "mnli": ["premise", "hypothesis"], "qnli": ["question", "sentence"],
    "rte": ["sentence1", "sentence2"],
}  # fmt: skip
"""The text columns of GLUE's configurations, which all have `label` and `idx` too."""


def make_glue(folder: Path) -> Path:
    def rows(split: str, *columns: str) -> list[dict[str, Any]]:
        texts = [{column: f"{split} {column} {at}" for column in columns} for at in range(ROWS)]
        return [{**row, "label": at % 2, "idx": at} for at, row in enumerate(texts)]

    yes_no = ClassLabel(names=["no", "yes"])
    splits = {name: ["train", "validation"] for name in GLUE}
    splits["mnli"] = ["train", "validation_matched", "validation_mismatched"]
    for name, used in GLUE.items():
        for split in splits[name]:
            label = Value("float32") if name == "stsb" else yes_no
            features = {**dict.fromkeys(used, TEXT), "label": label, "idx": NUMBER}
            write_split(folder / name, split, rows(split, *used), features)
    return card(folder, splits)


def make_tokens(folder: Path, tokens: str, labels: str, kind: Any, more: dict[str, Any] | None = None) -> Path:
    more = more or {}
    features = {tokens: Sequence(TEXT), labels: Sequence(kind), **dict.fromkeys(more, TEXT)}
    for split in ("train", "validation", "test"):
        rows = [{tokens: [split, "New", "York", str(at)], labels: [0, 1, 2, 0], **more} for at in range(ROWS)]
        write_split(folder / "default", split, rows, features)
    return card(folder, {"default": ["train", "validation", "test"]})


def make_answers(folder: Path, empty: bool = False, name: str = "default") -> Path:
    features = {"id": TEXT, "title": TEXT, "question": TEXT, "context": TEXT, "answers": ANSWERS}
    for split in ("train", "validation"):
        rows = []
        for at in range(ROWS):
            answers: dict[str, Any] = {"text": [str(at), str(at)], "answer_start": [14, 14]}
            if empty and at % 3 == 0:
                answers = {"text": [], "answer_start": []}
            context = f"The number is {at}."
            rows.append({"id": f"{split}{at}", "title": "n", "question": "Which?", "context": context, "answers": answers})
        write_split(folder / name, split, rows, features)
    return card(folder, {name: ["train", "validation"]})


def make_beir(root: Path, name: str, splits: list[str]) -> tuple[Path, Path]:
    """A corpus of 100 documents, queries q0 to q59, and for each split 20 queries with a relevant and a judged document."""
    columns = {"_id": TEXT, "title": TEXT, "text": TEXT}
    documents = [{"_id": f"{at}", "title": f"title {at}", "text": f"text {at}"} for at in range(100)]
    write_split(root / name / "corpus", "corpus", documents, columns)
    queries = [{"_id": f"{at}", "title": "", "text": f"query {at}"} for at in range(60)]
    write_split(root / name / "queries", "queries", queries, columns)
    card(root / name, {"corpus": ["corpus"], "queries": ["queries"]})
    for number, split in enumerate(splits):
        rows = []
        for query in range(20 * number, 20 * number + 20):
            rows.append({"query-id": query, "corpus-id": query, "score": 2})
            rows.append({"query-id": query, "corpus-id": query + 1, "score": 0})
        features = {"query-id": Value("int64"), "corpus-id": Value("int64"), "score": NUMBER}
        write_split(root / f"{name}-qrels" / "default", split, rows, features)
    return root / name, card(root / f"{name}-qrels", {"default": splits})


def make_mldr(folder: Path) -> Path:
    passage = {"docid": TEXT, "title": TEXT, "text": TEXT}
    features = {"query_id": TEXT, "query": TEXT, "positive_passages": [passage], "negative_passages": [passage]}
    for split in ("dev", "test"):
        rows = []
        for at in range(10):
            right = [{"docid": f"d-{split}-{at}-{number}", "title": "", "text": "x"} for number in range(2)]
            rows.append({"query_id": f"q-{split}-{at}", "query": f"{split} {at}?", "positive_passages": right,
                         "negative_passages": []})  # fmt: skip
        write_split(folder / "default", split, rows, features)
    ids = [f"d-{split}-{at}-{number}" for split in ("dev", "test", "train") for at in range(10) for number in range(2)]
    documents = [{"docid": id, "text": f"long {id}"} for id in ids]
    write_split(folder / "corpus", "corpus", documents, {"docid": TEXT, "text": TEXT})
    return card(folder, {"default": ["dev", "test"], "corpus": ["corpus"]})


def make_all(root: Path, labels: list[str]) -> dict[str, str]:
    """The twelve, with UNER's labels of those names; gives the overrides by which tasks.yaml reads them."""
    glue = make_glue(root / "glue")
    msmarco, msmarco_qrels = make_beir(root, "msmarco", ["train", "validation", "test"])
    nq, nq_qrels = make_beir(root, "nq", ["test"])
    pairs = [{"query": f"query {at}", "positive": f"text {at}"} for at in range(30)]
    write_split(root / "pairs" / "default", "train", pairs, {"query": TEXT, "positive": TEXT})
    mldr = make_mldr(root / "mldr")
    places = {f"tasks.{task}.source.path": glue for task in ("sst2", "mnli", "qqp")}
    places["tasks.conll2003.source.path"] = make_tokens(root / "conll", "words", "ner", NUMBER)
    places["tasks.ontonotes5.source.path"] = make_tokens(root / "ontonotes", "tokens", "tags", NUMBER)
    places["tasks.ontonotes5.source.revision"] = "null"  # of the hub
    more = {"idx": "weblog-1", "text": "…", "annotator": "x"}
    uner = make_tokens(root / "uner", "tokens", "ner_tags", ClassLabel(names=labels), more)
    places["tasks.uner.source.path"] = uner
    places["tasks.squad.source.path"] = make_answers(root / "squad", name="plain_text")
    places["tasks.squad_v2.source.path"] = make_answers(root / "squad_v2", empty=True, name="squad_v2")
    places["tasks.record.source.path"] = make_answers(root / "record")
    places["tasks.msmarco.train.path"] = card(root / "pairs", {"default": ["train"]})
    for task, corpus, qrels in (("msmarco", msmarco, msmarco_qrels), ("nq", nq, nq_qrels), ("mldr", mldr, mldr)):
        places |= {f"tasks.{task}.corpus.path": corpus, f"tasks.{task}.queries.0.path": corpus}
        places |= {f"tasks.{task}.qrels.{split}.path": qrels for split in ("validation", "test")}
    places["tasks.mldr.queries.1.path"] = mldr
    return {key: str(place) for key, place in places.items()}


def one_task(tmp_path: Path, task: dict[str, Any], **keys: Any) -> TasksConfig:
    """The configuration of one task, `it`."""
    content = {"job": "tasks", "output": str(tmp_path / "out"), "tasks": {"it": {"license": "none", **task}}, **keys}
    return TasksConfig.model_validate(content)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as a file; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a prepared table."""
    return pq.read_table(folder / f"{name}.parquet").to_pylist()
