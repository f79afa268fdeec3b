"""Train an exported encoder to give sparse vectors (SPLADE), and score it beside a dense model's ranking.

    python recipes/sparse/sparse.py [ENCODER] [--pairs FOLDER --dense SET-SPLIT.run.gz --out FOLDER]

The model, its training and its losses are those of sentence-transformers; the scores are mteb's. A text's vector has a
weight for each token of the vocabulary: the largest, over the text's positions, of log(1 + relu(logit)), with the logits of
the export's own MLM head.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from dense_ranking import recipe_parser, train_and_compare, trainer_inputs


def train(options: argparse.Namespace) -> Any:
    """Return a `SparseEncoder` that was trained on the pairs with in-batch negatives and the FLOPS regularizer."""
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import set_seed

    set_seed(options.seed)  # the weights of an MLM head, where the encoder has none
    # `SparseEncoder(ENCODER)` would take the export's mean pooling, and add an autoencoder to it.
    settings = {"model_max_length": options.max_length}
    transformer = Transformer(str(options.encoder), transformer_task="fill-mask", processor_kwargs=settings)
    classes = transformer.auto_model.config.architectures or []
    if not any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in classes):
        print(f"WARNING: {options.encoder}: its files have no MLM head: a random one is trained", file=sys.stderr)
    model = SparseEncoder(modules=[transformer, SpladePooling("max")])
    arguments, pairs = trainer_inputs(SparseEncoderTrainingArguments, options, model)
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model, scale=options.scale),
        document_regularizer_weight=options.regularizer,
        query_regularizer_weight=options.regularizer,
    )
    SparseEncoderTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    return model


def active_dimensions(model: Any, split: dict[str, Any]) -> dict[str, Any]:
    """Return, and print, how many weights of queries and of documents are not zero, on average."""
    queries, documents = (split[name]["text"] for name in ("queries", "corpus"))
    active = {
        "queries": model.sparsity(model.encode_query(queries))["active_dims"],
        "documents": model.sparsity(model.encode_document(documents))["active_dims"],
    }
    print(f"active dimensions: {active['queries']:.0f} of a query, {active['documents']:.0f} of a document")
    return {"active": active}


def main(arguments: list[str] | None = None) -> int:
    """Train, save and score. Exit status 2 when the encoder, the pairs or the ranking is missing."""
    parser = recipe_parser(
        "Train an encoder to give sparse vectors, and score it.",
        **{"out": Path("runs/sparse"), "steps": 240, "lr": 4e-3, "max_length": 64},
    )
    parser.add_argument("--scale", type=float, default=0.05, help="of the scores, which are sums over the vocabulary")
    parser.add_argument("--regularizer", type=float, default=3e-5, help="weight of the FLOPS regularizer")
    return train_and_compare(parser.parse_args(arguments), train, describe=active_dimensions)


if __name__ == "__main__":
    raise SystemExit(main())
