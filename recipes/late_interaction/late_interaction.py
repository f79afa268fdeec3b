"""Train an exported encoder for late interaction (ColBERT), and score it beside a dense model's ranking.

    python recipes/late_interaction/late_interaction.py [ENCODER] [--pairs FOLDER --dense SET-SPLIT.run.gz --out FOLDER]

The model, its training and its loss are those of sentence-transformers; the scores are mteb's. A text has a vector for each
token. A document's score is the sum, over the query's tokens, of the largest similarity to one of the document's (MaxSim).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))

RUN = Path("runs/quickstart")


def train(options: argparse.Namespace) -> Any:
    """Return a `MultiVectorEncoder` that was trained on the pairs with in-batch negatives."""
    from datasets import Dataset
    from sentence_transformers import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
    )
    from sentence_transformers.base.sampler import BatchSamplers
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
    from transformers import set_seed

    set_seed(options.seed)  # the weights of the new projection
    model = MultiVectorEncoder(str(options.encoder), processor_kwargs={"model_max_length": options.max_length})
    arguments = MultiVectorEncoderTrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=0.1,
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    )
    pairs = Dataset(pq.read_table(options.pairs / "train.parquet", columns=["query", "positive"]))
    loss = MultiVectorMultipleNegativesRankingLoss(model)
    MultiVectorEncoderTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    return model


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = argparse.ArgumentParser(description="Train an encoder for late interaction, and score it.")
    parser.add_argument("encoder", nargs="?", default=RUN / "clm-mlm/encoder", help="an export, or a model of the hub")
    parser.add_argument("--pairs", type=Path, default=RUN / "text/pairs", help="a retrieval set (docs/tasks.md)")
    parser.add_argument("--dense", type=Path, default=RUN / "dense/predictions/docstrings-test.run.gz")
    parser.add_argument("--split", default="test", help="the one to score, and that of the ranking")
    parser.add_argument("--out", type=Path, default=Path("runs/late_interaction"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from dense_ranking import compare, read_trec_run

    from biphasic.evaluation.scoring import score
    from biphasic.evaluation.sets import read_set

    try:
        task, dense = (
            read_set(str(options.pairs), "Pairs", "eng-Latn", only=[options.split]),
            read_trec_run(options.dense),
        )
        model = train(options)
        model.save_pretrained(str(options.out / "model"))
        [[scores], _] = score(model, task)
        result = compare(scores, dense, task.content["default"][options.split]["relevant_docs"])
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    open_store(str(options.out)).write("scores.json", json_bytes(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
