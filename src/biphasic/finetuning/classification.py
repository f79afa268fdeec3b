"""Fine-tuning for classification: predict the label of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged, unpack
from biphasic.errors import UserError
from biphasic.finetuning.examples import TaskBatch, TokenizedExamples, concatenate
from biphasic.finetuning.task import PredictionTask
from biphasic.model.encoder import TextTokenizer
from biphasic.model.heads import TextHead
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments


class Classification(PredictionTask):
    """Trains with cross-entropy on mean-pooled tokens; scores accuracy and, for two labels, the second label's F1."""

    family = "classification"

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str):
        super().__init__(config, text_tokenizer, cache)
        self.metric = config.metric

    def build_head(self, width: int) -> nn.Module:
        """See `FinetuneTask`."""
        if self.metric == "f1" and len(self.data.label_names) != 2:
            raise UserError(f"task.metric: f1 needs two labels; {self.config.data} has {len(self.data.label_names)}")
        return TextHead(width, len(self.data.label_names))

    def examples(self, split: str) -> TokenizedExamples:
        """See `PredictionTask`."""

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "classification")
            pairs = zip(columns["text"], columns["text_pair"], strict=True)
            if "{text_pair}" in self.config.text and None in columns["text_pair"]:
                raise UserError(f"task.text: uses {{text_pair}}, but {self.config.data} has single texts")
            texts = [self.config.text.format(text=text, text_pair=pair) for text, pair in pairs]
            return {
                "texts": Ragged.of(
                    self.text_tokenizer.tokenize(texts, self.max_length, f"reading {self.config.name} {split}")
                ),
                "labels": Ragged.of([columns["label"]]),
            }

        arrays = self.tokenize_once("classification", split, make, text=self.config.text)
        return TokenizedExamples(unpack(arrays, "texts"), {"labels": unpack(arrays, "labels").flat})

    def collate(self, examples: TokenizedExamples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """See `FinetuneTask`."""
        tokens, lengths = concatenate(examples.texts, indices)
        labels = torch.from_numpy(examples.arrays["labels"][list(indices)]).long()
        return {"tokens": tokens, "lengths": lengths, "labels": labels}

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """See `FinetuneTask`."""
        logits = head(mean_pool(hidden, segments))
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum")

    def predict(
        self, head: nn.Module, examples: TokenizedExamples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        """Return the most likely label of each text, and its probability."""
        best = head(mean_pool(hidden, segments)).float().softmax(-1).max(-1)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def answers(self, split: str, predictions: list[Any]) -> dict[str, list[Any]]:
        """See `PredictionTask`. `score` is the probability of the label."""
        names = self.data.label_names
        return {
            "predicted": [names[label] for label, _ in predictions],
            "score": [probability for _, probability in predictions],
        }

    def gold(self, split: str) -> list[Any]:
        """See `PredictionTask`."""
        names = self.data.label_names
        return [names[label] for label in self.data.read(split, "classification")["label"]]

    def metrics(self, gold: list[Any], answers: dict[str, list[Any]]) -> dict[str, float]:
        """See `PredictionTask`."""
        from sklearn.metrics import accuracy_score, f1_score

        names, predicted = self.data.label_names, answers["predicted"]
        scores = {"accuracy": float(accuracy_score(gold, predicted))}
        if len(names) == 2:
            scores["f1"] = float(f1_score(gold, predicted, pos_label=names[1], zero_division=0))  # pyright: ignore[reportArgumentType]
        return scores
