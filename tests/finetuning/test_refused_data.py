"""What a run refuses about its data, its plan refuses in the same words, if it doesn't need the texts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from biphasic.downstream.prepare import prepare_task
from biphasic.errors import UserError
from biphasic.finetuning.plan import plan_finetuning
from biphasic.finetuning.run import run
from helpers.downstream_sets import jsonl, one_task
from helpers.toy_sets import config_of

TEXTS = [{"text": f"w{20 + at % 40}", "label": at % 3} for at in range(40)]
WORDS = [{"tokens": ["w20", "w21"], "labels": ["O", "B-PER"]} for _ in range(40)]


def prepared(folder: Path, rows: list[dict[str, Any]], **task: Any) -> str:
    files = {"train": [jsonl(folder / "rows.jsonl", rows)]}
    splits = dict.fromkeys(("train", "validation", "test"), "train")
    prepare_task("it", one_task(folder, {"source": {"files": files}, "splits": splits, **task}))
    return str(folder / "out" / "it")


def few(folder: Path) -> dict[str, Any]:
    data = prepared(folder, TEXTS[:24], kind="classification", text_column="text")
    return {"kind": "classification", "data": data}


def few_words(folder: Path) -> dict[str, Any]:
    data = prepared(folder, WORDS[:24], kind="tokens", labels_column="labels")
    return {"kind": "tokens", "data": data}


def f1_of_three(folder: Path) -> dict[str, Any]:
    data = prepared(folder, TEXTS, kind="classification", text_column="text")
    return {"kind": "classification", "data": data, "metrics": ["f1"]}


def pairs_of_single_texts(folder: Path) -> dict[str, Any]:
    data = prepared(folder, TEXTS, kind="classification", text_column="text")
    return {"kind": "classification", "data": data, "text": "{text} {text_pair}"}


def labels_of_an_older_set(folder: Path) -> dict[str, Any]:
    """As an earlier version of `biphasic tasks` wrote it."""
    data = prepared(folder, WORDS, kind="tokens", labels_column="labels")
    record = json.loads((Path(data) / "task.json").read_text())
    (Path(data) / "task.json").write_text(json.dumps({**record, "label_names": ["O", "LOC"]}))
    return {"kind": "tokens", "data": data}


def no_split(folder: Path) -> dict[str, Any]:
    data = prepared(folder, TEXTS, kind="classification", text_column="text")
    return {"kind": "classification", "data": data, "tests": {"it": "other"}}


def without_negatives(folder: Path) -> dict[str, Any]:
    pairs = [{"query": f"w{20 + at}", "positive": f"w{30 + at}"} for at in range(20)] * 2
    pairs = [{**pair, "hard": ["w50"] if at % 4 else []} for at, pair in enumerate(pairs)]
    corpus = [{"_id": f"d{at}", "text": f"w{30 + at}"} for at in range(20)]
    queries = [{"_id": f"q{at}", "text": f"w{20 + at}"} for at in range(20)]
    qrels = [{"query-id": f"q{at}", "corpus-id": f"d{at}", "score": 1} for at in range(20)]
    names = ("pairs", "corpus", "queries", "qrels")
    files = {name: {"files": [jsonl(folder / f"{name}.jsonl", rows)]} for name, rows in
             zip(names, (pairs, corpus, queries, qrels), strict=True)}  # fmt: skip
    task = {"kind": "retrieval", "corpus": files["corpus"], "queries": [files["queries"]], "judged_only": False}
    task |= {"train": {**files["pairs"], "negatives_column": "hard"}}
    prepare_task("it", one_task(folder, {**task, "qrels": {"validation": files["qrels"], "test": files["qrels"]}}))
    return {"kind": "retrieval", "data": str(folder / "out" / "it"), "hard_negatives": 1}


def two_grades(folder: Path) -> dict[str, Any]:
    """As earlier versions of `biphasic tasks` wrote such judgments."""
    data = without_negatives(folder)["data"]
    judgments = pq.read_table(f"{data}/qrels/test.parquet")
    other = judgments.slice(0, 1).set_column(2, "score", pa.array([2], pa.int32()))
    pq.write_table(pa.concat_tables([judgments, other.cast(judgments.schema)]), f"{data}/qrels/test.parquet")
    return {"kind": "retrieval", "data": data}


def second_text_left_out(folder: Path) -> dict[str, Any]:
    rows = [{**row, "other": "w1" if at % 4 else "w2"} for at, row in enumerate(TEXTS)]
    data = prepared(folder, rows, kind="classification", text_column="text", text_pair_column="other")
    return {"kind": "classification", "data": data}


def few_negatives(folder: Path) -> dict[str, Any]:
    task = without_negatives(folder)
    table = pq.read_table(f"{task['data']}/train.parquet").to_pydict()
    table["negatives"] = [["w50", "w51"], *[["w50"]] * 3] * 10
    pq.write_table(pa.table(table), f"{task['data']}/train.parquet")
    return {**task, "hard_negatives": 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (second_text_left_out, "task.text: '{text}' leaves out the text_pair of 40 training examples in "),
        (few_negatives, "task.hard_negatives: 30 of 40 pairs in "),
    ],
)
def test_plan_and_run_warn_of_the_same_data(
    make: Any, message: str, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "it", **make(tmp_path)}
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, task=task, max_duration="1ep")
    [warning] = plan_finetuning(config, 1).warnings
    assert warning.startswith(message)
    run(config)
    assert capsys.readouterr().out.count(f"WARNING: it: {warning}\n") == 1


def test_what_is_read_completely_gives_no_warning(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    pairs = {**second_text_left_out(tmp_path / "pairs"), "text": "{text_pair} {text}"}
    for task in (pairs, {**few_negatives(tmp_path), "hard_negatives": 1}):
        config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, task={"name": "it", **task}, max_duration="1ep")
        job_plan = plan_finetuning(config, 1)
        assert not job_plan.warnings and not job_plan.problems


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (few, "24 training examples don't fill one batch of 32"),
        (few_words, "24 training examples don't fill one batch of 32"),
        (f1_of_three, "task.metrics: f1 needs two labels"),
        (pairs_of_single_texts, "task.text: uses {text_pair}, but .* has single texts"),
        (labels_of_an_older_set, "its labels are not BIO .O, LOC., which seqeval scores: prepare it again"),
        (no_split, "has no other .it has: "),
        (without_negatives, "task.hard_negatives: 10 of 40 pairs in .* have none"),
        (two_grades, "qrels/test: judges document d0 for query q0 twice, with different grades"),
    ],
)
def test_plan_and_run_refuse_the_same_data(make: Any, message: str, toy: Path, tmp_path: Path) -> None:
    task = {"name": "it", **make(tmp_path)}
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, task=task, max_duration="1ep")
    with pytest.raises(UserError, match=message) as error:
        run(config)
    # A plan reads no texts.
    problems = [] if make is few_words else [str(error.value)]
    assert plan_finetuning(config, 1).problems == problems
