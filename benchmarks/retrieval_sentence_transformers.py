"""sentence-transformers' part of `retrieval.py`: its trainer and CachedMultipleNegativesRankingLoss."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from retrieval import read_shape
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import TrainerCallback

from biphasic.evaluation.search import rank_documents, retrieval_scores


class _Clock(TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())


def ndcg(model: SentenceTransformer, folder: Path) -> float:
    """NDCG@10 of the held-out queries."""
    queries, corpus, qrels = (pq.read_table(folder / f"{name}.parquet").to_pydict() for name in
                              ("queries", "corpus", "qrels/test"))  # fmt: skip
    vectors = [model.encode(table["text"], convert_to_tensor=True).float() for table in (queries, corpus)]
    ranking = rank_documents(queries["_id"], vectors[0], corpus["_id"], vectors[1])
    judged = {query: {document: 1} for query, document in zip(qrels["query-id"], qrels["corpus-id"], strict=True)}
    return retrieval_scores(ranking, judged)["ndcg_at_10"]


def run(folder: Path, seed: int) -> dict[str, Any]:
    """Train and score: seconds of each step after the first, NDCG@10, last loss."""
    shape = read_shape(folder)
    model = SentenceTransformer(str(folder / "llama"), device="cpu")
    model.max_seq_length = shape.longest
    columns = pq.read_table(folder / "pairs" / "train.parquet").to_pydict()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / f"sentence-transformers-{seed}"), use_cpu=True, max_steps=shape.steps, seed=seed,
        per_device_train_batch_size=shape.batch, learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-5,
        weight_decay=0.1, max_grad_norm=1.0, lr_scheduler_type="linear", warmup_steps=0.1, save_strategy="no",
        logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    clock = _Clock()
    # With mini_batch_num_tokens, for models that avoid padding, its steps take 1.9 times as long here.
    loss = losses.CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=shape.texts)
    dataset = Dataset.from_dict({name: columns[name] for name in ("query", "positive")})
    torch.manual_seed(seed)
    trainer = SentenceTransformerTrainer(model, arguments, dataset, loss=loss, callbacks=[clock])
    last = trainer.train().training_loss
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"seconds": seconds, "ndcg": ndcg(model, folder / "pairs"), "loss": last}


if __name__ == "__main__":
    path, number, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(Path(path), int(number))))
