"""Mined negatives are those of a brute-force search, and `biphasic tasks` reads them."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from biphasic.downstream.prepare import prepare_task
from biphasic.model.encoder import load_encoder
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.mteb_mirror import PROMPTS, write_model
from helpers.toy_sets import retrieval_pairs

ROOT = Path(__file__).parents[2]
COUNT = 3


def task_of(root: Path, **train: Any) -> dict[str, Any]:
    return {
        "kind": "retrieval",
        "train": {"query_column": "query", "positive_column": "positive", **train},
        "corpus": {"files": [str(root / "corpus.jsonl")], "text_columns": ["text"]},
        "queries": [{"files": [jsonl(root / "queries.jsonl", [{"_id": "q1", "text": "w1 w2"}])]}],
        "qrels": {"test": {"files": [jsonl(root / "qrels.jsonl", [{"query-id": "q1", "corpus-id": "d1", "score": 1}])]}},
        "judged_only": False,
    }


def load_recipe() -> Any:
    spec = importlib.util.spec_from_file_location("mine", ROOT / "recipes/hard_negatives/mine.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def test_nothing_is_written_without_negatives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"query": query, "positive": text} for query, text in retrieval_pairs(4, 1)]
    jsonl(tmp_path / "corpus.jsonl", [{"_id": "d1", "text": "w3"}])
    prepare_task("it", one_task(tmp_path, task_of(tmp_path, files=[jsonl(tmp_path / "pairs.jsonl", pairs)])))
    write_model(tmp_path / "encoder", PROMPTS)
    (tmp_path / "none").mkdir()
    for model, options, message in (
        ("encoder", ["--count", "6"], "no pair gets 6 negatives among its 100 best documents"),
        ("encoder", ["--count", "5", "--depth", "3"], "--count 5: expected a number from 1 to --depth, 3"),
        ("encoder", ["--count", "0"], "--count 0: expected a number from 1 to --depth, 100"),
        ("none", [], "none: can't be loaded"),
    ):
        out = tmp_path / "mined.parquet"
        assert load_recipe().main([str(tmp_path / model), str(tmp_path / "out/it"), str(out), *options]) == 2
        assert message in capsys.readouterr().err and not out.exists()


def test_what_cannot_be_written_is_said_before_the_corpus_is_embedded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out, message in (
        (tmp_path, f"{tmp_path}: expected the name of a file to write; this is a folder"),
        (tmp_path / "file/mined.parquet", f"File exists: '{tmp_path}/file'"),
    ):
        assert load_recipe().main(["no-model", "no-set", str(out)]) == 2
        assert message in capsys.readouterr().err


def test_negatives_are_those_of_a_brute_force_search(tmp_path: Path) -> None:
    pairs = [{"query": query, "positive": text} for query, text in retrieval_pairs(30, 1)]
    texts = [text for _, text in retrieval_pairs(40, 3)]
    jsonl(tmp_path / "corpus.jsonl", [{"_id": f"d{at}", "text": text} for at, text in enumerate(texts)])
    prepare_task("it", one_task(tmp_path, task_of(tmp_path, files=[jsonl(tmp_path / "pairs.jsonl", pairs)])))
    write_model(tmp_path / "encoder", PROMPTS)
    out = tmp_path / "new/folder/mined.parquet"
    options = ["--count", str(COUNT), "--depth", "60"]
    assert load_recipe().main([str(tmp_path / "encoder"), str(tmp_path / "out/it"), str(out), *options]) == 0
    encoder = load_encoder(str(tmp_path / "encoder"))

    def embed(role: str, text: str) -> np.ndarray:
        vector = encoder.embed(encoder.tokenize([PROMPTS[role] + text]))[0].double().numpy()
        return vector / np.linalg.norm(vector)

    documents = list(dict.fromkeys([*(row["positive"] for row in pairs), *texts]))
    matrix = np.stack([embed("document", text) for text in documents])
    rows = pq.read_table(out).to_pylist()
    assert len(rows) > 15
    for row in rows:
        scores = matrix @ embed("query", row["query"])
        positive = scores[documents.index(row["positive"])]
        own = {pair["positive"] for pair in pairs if pair["query"] == row["query"]}
        limit = positive - abs(positive) * 0.05
        allowed = sorted((score for score, text in zip(scores, documents, strict=True)
                          if text not in own and score < limit), reverse=True)  # fmt: skip
        np.testing.assert_allclose(row["scores"], [positive, *allowed[:COUNT]], atol=1e-5)
        assert len(set(row["negatives"])) == COUNT and not own & {*row["negatives"]}
        np.testing.assert_allclose(
            [scores[documents.index(text)] for text in row["negatives"]], row["scores"][1:], atol=1e-5
        )
    task = task_of(tmp_path, files=[str(out)], negatives_column="negatives", scores_column="scores")
    (tmp_path / "again").mkdir()
    prepare_task("it", one_task(tmp_path / "again", task))
    assert len(rows_of(tmp_path / "again/out/it", "train")) == len(rows)
