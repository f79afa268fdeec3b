"""Train an exported encoder as a reranker (cross-encoder), and let it rerank a dense model's top 100.

    python recipes/reranker/reranker.py [ENCODER] [--pairs FOLDER --dense SET-SPLIT.run.gz --out FOLDER]

The model, its training and its loss are those of sentence-transformers; the scores are mteb's. The query and the document
are one text, and the model gives it a score.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from biphasic.evaluation.search import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from dense_ranking import recipe_parser, train_and_compare, trainer_inputs


def train(options: argparse.Namespace) -> Any:
    """Return a `CrossEncoder` that was trained to give a query's own document more than four others of the batch."""
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
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
    arguments, pairs = trainer_inputs(CrossEncoderTrainingArguments, options)
    CrossEncoderTrainer(model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)).train()
    return model


def score_only_ranked(split: dict[str, Any], ranking: Run) -> None:
    """Let mteb score only the documents of the ranking, which are then reranked."""
    split["top_ranked"] = {query: [document for document, _ in documents] for query, documents in ranking.items()}


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = recipe_parser(
        "Train a reranker, and let it rerank a dense model's top 100.",
        **{"out": Path("runs/reranker"), "steps": 1000, "lr": 2e-3, "max_length": 96},
    )
    return train_and_compare(parser.parse_args(arguments), train, prepare=score_only_ranked)


if __name__ == "__main__":
    raise SystemExit(main())
