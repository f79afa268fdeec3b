"""A retrieval set of one's own, by the YAML that is its example."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.tasks import TasksConfig
from biphasic.downstream.prepare import prepare_task
from biphasic.errors import ConfigError
from helpers.tiny import ROOT

YAML = ROOT / "yamls" / "data" / "own_retrieval.yaml"


def write_set(folder: Path) -> None:
    """The four files that the YAML names; the documents d0 to d8, of which d8 has no judgment."""
    tables = {
        "pairs": [{"query": f"query {at}", "positive": f"text {at}"} for at in range(8)],
        "corpus": [{"_id": f"d{at}", "text": f"text {at}"} for at in range(9)],
        "queries": [{"_id": f"q{at}", "text": f"query {at}"} for at in range(8)],
    }
    folder.mkdir(parents=True)
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judgments = "".join(f"q{at}\td{at}\t1\n" for at in range(8))
    (folder / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judgments}")


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "data" / "my_set")
    config = load(YAML)
    assert isinstance(config, TasksConfig)
    finetune = load(ROOT / "yamls" / "finetune" / "own_retrieval.yaml")
    assert isinstance(finetune, FinetuneConfig)
    record = prepare_task(finetune.task.name, config)
    rows = record["rows"]
    assert (rows["train"], rows["queries"], rows["corpus"]) == (8, 8, 9)
    assert rows["qrels/validation"] + rows["qrels/test"] == 8
    pairs = pq.read_table(tmp_path / finetune.task.data / "train.parquet").to_pylist()
    assert pairs[3] == {"query": "query 3", "positive": "text 3", "negatives": []}


def test_files_of_one_split_and_of_several() -> None:
    config = load(YAML, ["tasks.mine.corpus={files: [c.csv], split: corpus}"])
    assert isinstance(config, TasksConfig)
    assert config.tasks["mine"].corpus.files == {"corpus": ["c.csv"]}  # pyright: ignore
    tasks = ROOT / "yamls" / "data" / "tasks.yaml"
    with pytest.raises(ConfigError) as caught:
        load(tasks, ["tasks.sst2.source={path: null, name: null, files: [a.jsonl]}"])
    expected = "expected the files of each split, such as {train: [train.jsonl]}; got ['a.jsonl']"
    assert f"tasks.sst2.source.files: {expected}" in str(caught.value)


def test_scores_of_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with faults are left out and counted; the others keep their scores."""
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "data" / "my_set")
    pairs = [
        {"query": f"query {at}", "positive": f"text {at}", "negatives": ["a", "b"], "scores": [9.5, 2, -1.25]}
        for at in range(6)
    ]
    pairs[1]["scores"] = [9.5, 2.0]
    pairs[2]["scores"] = None
    pairs[3]["scores"] = [9.5, 2.0, float("nan")]
    pairs[4]["scores"] = [9.5, None, 2.0]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    train = "tasks.mine.train={files: [pairs.parquet], negatives_column: negatives, scores_column: scores}"
    config = load(YAML, [train, "max_invalid_share=0.9"])
    assert isinstance(config, TasksConfig)
    record = prepare_task("mine", config)
    assert record["left_out"]["train"] == {
        "a score: None is not a finite number of 32 bits": 1,
        "a score: nan is not a finite number of 32 bits": 1,
        "the scores are not a list of one for the positive and for each negative": 2,
    }
    rows = pq.read_table(tmp_path / config.output / "mine" / "train.parquet").to_pylist()
    assert [row["scores"] for row in rows] == [[9.5, 2.0, -1.25]] * 2
    assert rows[1]["query"] == "query 5"
