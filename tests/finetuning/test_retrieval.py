"""Retrieval fine-tuning: the loss, its two-rank form, learning, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig

from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.evaluation.retrieval import MTEBEncoder, bm25, retrieval_from_pairs, retrieval_task, score
from biphasic.export.write import export_encoder
from biphasic.finetuning.retrieval import info_nce
from biphasic.finetuning.run import run
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.fresh import from_hf_config
from tiny import WORDS, composer_command


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
    found = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.pt"
        command = composer_command(Path(__file__).parent / "two_ranks.py", out, processes=processes)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert out.exists(), outcome.stderr[-2000:]
        found.append(torch.load(out))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    assert found[0][1:].abs().sum() > 0


@pytest.fixture
def start(dataset: Path, tmp_path: Path) -> Path:
    """An untrained encoder."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None,
    )  # fmt: skip
    tokenizer = load_tokenizer(str(dataset / "tokenizer"))
    export_encoder(from_hf_config(config, seed=0).backbone, tokenizer, tmp_path / "start", "card")
    return tmp_path / "start"


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """A query names a topic in other words than its document: word i of a query is word i + 30 of the document."""
    generator = np.random.default_rng(seed)
    queries, documents = [], []
    for _ in range(count):
        topic = generator.choice(30, size=4, replace=False)
        queries.append(" ".join(f"w{word}" for word in topic))
        documents.append(" ".join(f"w{word + 30}" for word in generator.permutation(topic)))
    pq.write_table(pa.table({"query": queries, "positive": documents}), path)
    return path


def config_of(start: Path, train: Path, tmp_path: Path, **changes: object) -> FinetuneConfig:
    content = {
        "job": "finetune",
        "run_name": "fine",
        "output": str(tmp_path / "runs"),
        "model": {"path": str(start)},
        "task": {
            "name": "retrieval",
            "train": [str(train)],
            "query_prompt": "w0 ",
            "document_prompt": "",
            "max_length": 16,
        },
        "max_duration": "60ba",
        "batch_size": 32,
        "optimizer": {"lr": 5e-3},
        "logging": {"tensorboard": False, "progress_bar": False},
    }
    return FinetuneConfig.model_validate({**content, **changes})


def test_it_learns_what_the_untrained_model_cannot_know(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = write_pairs(tmp_path / "train.parquet", 2000, 1), write_pairs(tmp_path / "test.parquet", 100, 2)
    config = config_of(start, train, tmp_path)
    folder = run(config)
    record = json.loads((folder / "record.json").read_text())
    assert record["steps"] == 60
    task = retrieval_from_pairs("Toy", [str(held_out)])
    before = score(MTEBEncoder(load_encoder(str(start)), "biphasic/start", "0"), task, tmp_path / "scores")
    encoder = load_encoder(str(folder / "model"))
    assert encoder.max_length == 16
    after = score(MTEBEncoder(encoder, "biphasic/fine", "1"), task, tmp_path / "scores")
    assert after.ndcg_at_10 > before.ndcg_at_10 + 0.3, (before.ndcg_at_10, after.ndcg_at_10)
    assert len(after.by_query) == 100
    assert abs(sum(after.by_query.values()) / 100 - after.ndcg_at_10) < 1e-5  # mteb rounds to five places
    # No word in common: nothing for BM25.
    assert score(bm25(), task, tmp_path / "scores").ndcg_at_10 < 0.2

    # The same encoder through sentence-transformers, with its own prompts, pooling and cutting, scores the same.
    from sentence_transformers import SentenceTransformer

    theirs = score(SentenceTransformer(str(folder / "model"), device="cpu"), task, tmp_path / "scores")
    assert abs(theirs.ndcg_at_10 - after.ndcg_at_10) < 1e-4

    # Done is done; other settings under the same name are refused; the same seed gives the same weights.
    run(config)
    assert "already fine-tuned" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds another fine-tuning"):
        run(config_of(start, train, tmp_path, seed=5))
    again = load_encoder(str(run(config_of(start, train, tmp_path, run_name="again")) / "model"))
    for name, weight in encoder.backbone.state_dict().items():
        assert torch.equal(weight, again.backbone.state_dict()[name]), name


def test_at_most_one_epoch(start: Path, tmp_path: Path) -> None:
    config = config_of(start, write_pairs(tmp_path / "train.parquet", 70, 1), tmp_path)
    assert json.loads((run(config) / "record.json").read_text())["steps"] == 2


def test_bad_input_is_one_line(start: Path, tmp_path: Path) -> None:
    train = write_pairs(tmp_path / "train.parquet", 10, 1)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"question": ["a"], "positive": ["b"]}), other)
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"query": pa.array([], pa.string()), "positive": pa.array([], pa.string())}), empty)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for path, says in (
        (other, r"has no column `query` \(it has: question, positive\)"),
        (empty, "no rows in"),
        (tmp_path / "broken.parquet", "can't be read"),
        (tmp_path / "missing.parquet", "can't be read"),
        (train, "don't fill one batch of 32"),
    ):
        with pytest.raises(UserError, match=says):
            run(config_of(start, path, tmp_path))
    with pytest.raises(UserError, match="be loaded"):
        run(config_of(tmp_path / "no-model", train, tmp_path))
    with pytest.raises(UserError, match="corpus is empty"):
        retrieval_task("Empty", {}, {"q": "a"}, {"q": {"d": 1}})
    with pytest.raises(UserError, match=r"1 queries have no relevant document, e\.g\. q"):
        retrieval_task("Lost", {"d": "a"}, {"q": "a"}, {})


def test_embedding_does_not_depend_on_the_batch(start: Path) -> None:
    encoder: Encoder = load_encoder(str(start))
    texts = [[5, 6, 7], [8] * 30, [9], [10, 11, 12, 13]]
    together = encoder.embed(texts)
    for text, embedding in zip(texts, together, strict=True):
        torch.testing.assert_close(encoder.embed([text])[0], embedding, atol=1e-6, rtol=1e-5)
    assert encoder.embed([]).shape == (0, 32)
