"""Train an exported encoder for late interaction (ColBERT), and score it beside a dense model's ranking.

    python recipes/late_interaction/late_interaction.py [ENCODER] [--pairs FOLDER --dense SET-SPLIT.run.gz --out FOLDER]

The model, its training and its loss are those of sentence-transformers; the scores are mteb's. A text has a vector for each
token. A document's score is the sum, over the query's tokens, of the largest similarity to one of the document's (MaxSim).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from dense_ranking import recipe_parser, train_and_compare, trainer_inputs


def train(options: argparse.Namespace) -> Any:
    """Return a `MultiVectorEncoder` that was trained on the pairs with in-batch negatives."""
    from sentence_transformers import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
    )
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
    from transformers import set_seed

    set_seed(options.seed)  # the weights of the new projection
    model = MultiVectorEncoder(str(options.encoder), processor_kwargs={"model_max_length": options.max_length})
    arguments, pairs = trainer_inputs(MultiVectorEncoderTrainingArguments, options, model)
    loss = MultiVectorMultipleNegativesRankingLoss(model)
    MultiVectorEncoderTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    return model


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = recipe_parser(
        "Train an encoder for late interaction, and score it.",
        **{"out": Path("runs/late_interaction"), "steps": 240, "lr": 4e-3, "max_length": 64},
    )
    return train_and_compare(parser.parse_args(arguments), train)


if __name__ == "__main__":
    raise SystemExit(main())
