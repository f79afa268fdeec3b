"""Retrieval fine-tuning: the loss, its two-rank form, hard negatives, and mteb's view of what was trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import two_ranks
from biphasic.config.durations import Duration
from biphasic.config.errors import UserError
from biphasic.config.load import dump
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import bm25, score
from biphasic.evaluation.sets import read_set, retrieval_from_pairs, retrieval_task
from biphasic.finetuning.retrieval import Retrieval, _number, info_nce
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import run_trial
from biphasic.model.encoder import Encoder, load_encoder
from s3_server import free_port
from tiny import launch, losses
from toy_sets import config_of


def test_info_nce_is_the_full_matrix_s() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, documents = (torch.randn(5, 7, generator=generator) for _ in range(2))
    ids = torch.tensor([3, 1, 3, 4, 5])
    q, d = (x / x.norm(dim=1, keepdim=True) for x in (queries, documents))
    total = 0.0
    for i in range(5):
        scores = [float(q[i] @ d[j]) / 0.05 for j in range(5) if j == i or ids[j] != ids[i]]
        own = float(q[i] @ d[i]) / 0.05
        total += float(np.log(np.sum(np.exp(np.array(scores) - own))))
    found = info_nce(queries, documents, ids, 0.05, gather=False)
    assert abs(float(found) - total / 5) < 1e-5


def test_two_ranks_are_one(tmp_path: Path) -> None:
    out, port = tmp_path / "out.pt", free_port()
    script = [sys.executable, str(Path(two_ranks.__file__))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [subprocess.Popen([*script, str(rank), "2", str(port), str(out)], env=environment) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    one = two_ranks.loss_and_gradient(0, 1)
    torch.testing.assert_close(torch.load(out), one, atol=1e-5, rtol=1e-5)
    assert one[1:].abs().sum() > 0


def test_hard_negatives_are_documents_more(toy: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, documents = torch.randn(3, 7, generator=generator), torch.randn(5, 7, generator=generator)
    ids = torch.tensor([0, 1, 2, 1, 9])  # the first hard negative is the second query's own document
    q, d = (F.normalize(x, dim=1) for x in (queries, documents))
    total = 0.0
    for i in range(3):
        scores = [float(q[i] @ d[j]) / 0.05 for j in range(5) if j == i or ids[j] != ids[i]]
        total += float(np.log(np.sum(np.exp(np.array(scores) - float(q[i] @ d[i]) / 0.05))))
    assert abs(float(info_nce(queries, documents, ids, 0.05, gather=False)) - total / 3) < 1e-5


def test_which_hard_negatives(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hard"
    shutil.copytree(toy / "tasks" / "msmarco", folder)
    rows = 64
    negatives = [[f"w{at % 50 + number}" for number in range(1 + at % 3)] for at in range(rows)]
    texts = [f"w{at % 60} w{at // 60}" for at in range(rows)]
    table = pa.table({"query": texts, "positive": texts, "negatives": negatives})
    pq.write_table(table, folder / "train.parquet")
    config = config_of(
        "msmarco", toy / "tasks", toy / "start", tmp_path, task__data=str(folder), task__hard_negatives=2
    )
    reader = load_encoder(str(toy / "start")).reader
    task = Retrieval(config.task, reader, config.cache)
    examples = task.training()
    batch = task.collate(examples, [5, 0, 7], epoch=0, seed=1)
    assert batch["queries"] == 3
    assert len(batch["lengths"]) == 3 + 3 + 6
    known = {_number(text): text for row in negatives for text in row} | {_number(text): text for text in texts}
    documents = [known[int(id)] for id in batch["ids"]]
    assert documents[:3] == [texts[5], texts[0], texts[7]]
    for at, row in enumerate((5, 0, 7)):
        assert set(documents[3 + 2 * at : 5 + 2 * at]) <= set(negatives[row])
    assert len(set(documents[3:5])) == 2  # row 5 has three of them, so no one twice
    # The tokens are those texts'.
    tokens = batch["tokens"].split(batch["lengths"])
    assert [one.tolist() for one in tokens[3:]] == list(reader.read(documents, 64))
    # A draw is the row's, the epoch's and the seed's, whatever stands beside it.
    alone = task.collate(examples, [5], epoch=0, seed=1)
    assert torch.equal(alone["ids"][1:], batch["ids"][3:5])
    for kind in ("epochs", "seeds"):
        draws = [(0, at) if kind == "seeds" else (at, 1) for at in range(2, 8)]
        others = [task.collate(examples, [5], epoch, seed)["ids"][1:].tolist() for epoch, seed in draws]
        assert any(one != alone["ids"][1:].tolist() for one in others), kind
    assert run_trial(config.model_copy(update={"max_duration": Duration(2, "ba")})).about["steps"] == 2


@pytest.mark.parametrize("name", ["msmarco", "conll2003", "squad"])
def test_two_ranks_train_as_one(name: str, toy: Path, tmp_path: Path) -> None:
    """Equal global batches, equal losses, of each batch: negatives are gathered with gradients, and means are over what all
    ranks predict."""
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        config = config_of(name, toy / "tasks", toy / "start", folder, max_duration="8ba", logging__jsonl=True)
        path = tmp_path / f"{ranks}.yaml"
        path.write_text(dump(config))
        outcome = launch(path, processes=ranks)
        assert outcome.returncode == 0, outcome.stderr[-2000:]
        record = json.loads((folder / "runs" / name / "record.json").read_text())
        found.append((losses(folder / "runs" / name), record["results"], record["about"]["ranks"]))
    assert [one[2] for one in found] == [1, 2]
    assert len(found[0][0]) == 8
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one["test"] == pytest.approx(two["test"], abs=0.02)
        assert one["validation"] == pytest.approx(two["validation"], abs=0.02)


def test_mteb_sees_the_same(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("msmarco", toy / "tasks", toy / "start", tmp_path, max_duration="30ba", save_model=True)
    folder = run(config)
    [result] = json.loads((folder / "record.json").read_text())["results"]
    # The set's own folder is laid out as BEIR's are.
    task = read_set(str(toy / "tasks" / "msmarco"), "Toy", "eng-Latn", ["test"])
    [ours], _ = score(Retriever(EncoderEmbedder(load_encoder(str(folder / "model")), "biphasic/fine", "1")), task)
    for name in ("ndcg_at_10", "mrr_at_10", "recall_at_100"):
        assert abs(getattr(ours, name) - result["more"]["test"][name]) < 2e-5, name  # mteb rounds to five places
    before = score(Retriever(EncoderEmbedder(load_encoder(str(toy / "start")), "biphasic/start", "0")), task)[0][0]
    assert ours.value > before.value + 0.2
    assert len(ours.by_query) == 160
    # No word in common: nothing for BM25.
    assert score(bm25(), task)[0][0].value < 0.2

    # The same encoder through sentence-transformers, with its own prompts, pooling and cutting, scores the same.
    from sentence_transformers import SentenceTransformer

    theirs = score(SentenceTransformer(str(folder / "model"), device="cpu"), task)[0][0]
    assert abs(theirs.value - ours.value) < 1e-4


def test_pairs_as_a_task(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["a", "b"], "positive": ["x", "y"]}), tmp_path / "pairs.parquet")
    task = retrieval_from_pairs("Pairs", [str(tmp_path / "pairs.parquet")])
    assert task.content["default"]["test"]["corpus"]["text"] == ["x", "y"]
    for table, says in (
        ({"question": ["a"], "positive": ["b"]}, r"has no column `query` \(it has: question, positive\)"),
        ({"query": pa.array([], pa.string()), "positive": pa.array([], pa.string())}, "corpus is empty"),
    ):
        pq.write_table(pa.table(table), tmp_path / "odd.parquet")
        with pytest.raises(UserError, match=says):
            retrieval_from_pairs("Odd", [str(tmp_path / "odd.parquet")])
    (tmp_path / "odd.parquet").write_bytes(b"PAR1")
    for name in ("odd", "missing"):
        with pytest.raises(UserError, match="can't be read"):
            retrieval_from_pairs("Odd", [str(tmp_path / f"{name}.parquet")])
    with pytest.raises(UserError, match="corpus is empty"):
        retrieval_task("Empty", {}, {"q": "a"}, {"q": {"d": 1}})
    with pytest.raises(UserError, match=r"1 queries have no judgments \(qrels\), e\.g\. q"):
        retrieval_task("Lost", {"d": "a"}, {"q": "a"}, {})


def test_embedding_does_not_depend_on_the_batch(toy: Path) -> None:
    encoder: Encoder = load_encoder(str(toy / "start"))
    texts = [[5, 6, 7], [8] * 30, [9], [10, 11, 12, 13]]
    together = encoder.embed(texts)
    for text, embedding in zip(texts, together, strict=True):
        torch.testing.assert_close(encoder.embed([text])[0], embedding, atol=1e-6, rtol=1e-5)
    assert encoder.embed([]).shape == (0, 32)
