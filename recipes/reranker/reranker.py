"""Train an exported encoder as a reranker (cross-encoder), and let it rerank a dense model's top 100.

    python recipes/reranker/reranker.py [ENCODER] [--pairs FOLDER --dense MODEL --ranking SET-SPLIT.run.gz --out FOLDER]

The model, its training, its loss and the search for hard negatives are those of sentence-transformers; mteb scores it. The
query and the document are one text, and the model gives it a score.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store

RUN = Path("runs/quickstart")


def train(options: argparse.Namespace) -> Any:
    """Return a `CrossEncoder` that was trained on the pairs, and on the dense model's hard negatives of their queries."""
    from datasets import Dataset
    from sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        SentenceTransformer,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.util import mine_hard_negatives
    from tokenizers.processors import TemplateProcessing
    from torch import tensor
    from transformers import set_seed

    pairs = Dataset(pq.read_table(options.pairs / "train.parquet", columns=["query", "positive"]))
    examples = mine_hard_negatives(
        pairs.shuffle(options.seed).select(range(min(options.examples, len(pairs)))),
        SentenceTransformer(str(options.dense)),
        corpus=list(pairs["positive"]),
        range_max=100,
        num_negatives=options.negatives,
        sampling_strategy="random",
        output_format="labeled-pair",
        verbose=False,
    )
    set_seed(options.seed)  # the weights of the new head
    model = CrossEncoder(str(options.encoder), num_labels=1, max_length=options.max_length)
    # An export's tokenizer would put nothing between the two texts. In pretraining, this token ends a text.
    end: Any = model.tokenizer.eos_token
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair=f"$A {end} $B", special_tokens=[(end, model.tokenizer.eos_token_id)]
    )
    arguments = CrossEncoderTrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=0.1,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    )
    loss = BinaryCrossEntropyLoss(model, pos_weight=tensor(float(options.negatives)))
    CrossEncoderTrainer(model, arguments, train_dataset=examples, loss=loss).train()
    return model


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = argparse.ArgumentParser(description="Train a reranker, and let it rerank a dense model's top 100.")
    parser.add_argument("encoder", nargs="?", default=RUN / "clm-mlm/encoder", help="an export, or a model of the hub")
    parser.add_argument("--pairs", type=Path, default=RUN / "text/pairs", help="a retrieval set (docs/tasks.md)")
    parser.add_argument("--dense", default=RUN / "dense/model", help="the model that finds negatives")
    parser.add_argument("--ranking", type=Path, default=RUN / "dense/predictions/docstrings-test.run.gz")
    parser.add_argument("--split", default="test", help="the one to score, and that of the ranking")
    parser.add_argument("--out", type=Path, default=Path("runs/reranker"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-length", type=int, default=96, help="tokens of both texts")
    parser.add_argument("--examples", type=int, default=8000, help="pairs to find hard negatives for")
    parser.add_argument("--negatives", type=int, default=4, help="hard negatives of each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from biphasic.evaluation.scoring import compare, score
    from biphasic.evaluation.search import read_trec_run
    from biphasic.evaluation.sets import read_set

    try:
        task, dense = (
            read_set(str(options.pairs), "Pairs", "eng-Latn", only=[options.split]),
            read_trec_run(options.ranking),
        )
        test = task.content["default"][options.split]
        test["top_ranked"] = {query: [document for document, _ in documents] for query, documents in dense.items()}
        model = train(options)
        model.save_pretrained(str(options.out / "model"))
        [[scores], _] = score(model, task)
        result = compare(scores, dense, test["relevant_docs"])
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    open_store(str(options.out)).write("scores.json", json_bytes(result))
    for name, values in result.items():
        print(f"{name}: {values['ndcg_at_10']:.3f} ({values['interval'][0]:.3f} to {values['interval'][1]:.3f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
