"""Train an exported encoder as a reranker (cross-encoder), and let it rerank a dense model's top 100.

    python recipes/reranker/reranker.py [ENCODER] [--pairs FOLDER --dense SET-SPLIT.run.gz --out FOLDER]

The model, its training and its loss are those of sentence-transformers; the scores are mteb's. The query and the document
are one text, and the model gives it a score.
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
    """Return a `CrossEncoder` that was trained to give a query's own document more than four others of the batch."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.base.sampler import BatchSamplers
    from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss
    from tokenizers.processors import TemplateProcessing
    from transformers import set_seed

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
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    )
    pairs = Dataset(pq.read_table(options.pairs / "train.parquet", columns=["query", "positive"]))
    CrossEncoderTrainer(model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)).train()
    return model


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = argparse.ArgumentParser(description="Train a reranker, and let it rerank a dense model's top 100.")
    parser.add_argument("encoder", nargs="?", default=RUN / "clm-mlm/encoder", help="an export, or a model of the hub")
    parser.add_argument("--pairs", type=Path, default=RUN / "text/pairs", help="a retrieval set (docs/tasks.md)")
    parser.add_argument("--dense", type=Path, default=RUN / "dense/predictions/docstrings-test.run.gz")
    parser.add_argument("--split", default="test", help="the one to score, and that of the ranking")
    parser.add_argument("--out", type=Path, default=Path("runs/reranker"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-length", type=int, default=96, help="tokens of both texts")
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
