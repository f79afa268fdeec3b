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

from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.evaluation.search import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from dense_ranking import recipe_parser, train_and_compare, trainer_inputs


def train(options: argparse.Namespace) -> Any:
    """Return a `CrossEncoder` that was trained to give a query's own document more than four others of the batch."""
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss
    from transformers import set_seed

    set_seed(options.seed)  # the weights of the new head
    model = CrossEncoder(str(options.encoder), num_labels=1, max_length=options.max_length)
    arguments, pairs = trainer_inputs(CrossEncoderTrainingArguments, options, model)
    divide_texts(model.tokenizer, pairs[0]["query"], pairs[0]["positive"])
    CrossEncoderTrainer(model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)).train()
    return model


def divide_texts(tokenizer: Any, first: str, second: str) -> None:
    """Let a tokenizer put a token between the two texts of a pair, such as these, if it puts none there.

    It is the one that ends a text in pretraining. A tokenizer with a template for pairs, such as BERT's, keeps it.
    Raises a UserError if the tokenizer has no such token.
    """
    from tokenizers.processors import TemplateProcessing

    encoded = tokenizer(first, second)
    parts = encoded.sequence_ids()  # 0 and 1 for tokens of the texts, None for special tokens
    if parts[parts.index(1) - 1] is None:
        return
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    before, after = tokens[: parts.index(0)], tokens[len(parts) - parts[::-1].index(1) :]
    if not before and tokenizer.cls_token is not None:
        before = [tokenizer.cls_token]  # families with this token have heads that read the first position
    end = tokenizer.eos_token or tokenizer.sep_token
    if end is None:
        raise UserError(f"{tokenizer.name_or_path}: expected a token that ends a text, eos or sep; its tokenizer has none")
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in (*before, end, *after)}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", end, "$B", *after], special_tokens=list(special.items())
    )


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
