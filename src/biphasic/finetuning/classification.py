"""A label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.data.array_cache import Ragged, unpack
from biphasic.evaluation.metrics import accuracy, f1
from biphasic.finetuning.task import Batch, Examples, SplitTask, flat
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TextHead
from biphasic.model.packed import mean_pool
from biphasic.model.segments import Segments


class Classification(SplitTask):
    """Mean-pooled tokens, cross-entropy; accuracy, and F1 where there are two labels."""

    family = "classification"

    @property
    def metric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the YAML chooses by."""
        return self.config.metric

    def head(self, width: int) -> nn.Module:
        """See `Task`."""
        if self.config.metric == "f1" and len(self.data.label_names) != 2:
            raise UserError(f"task.metric: f1 is of two labels; {self.config.data} has {len(self.data.label_names)}")
        return TextHead(width, len(self.data.label_names))

    def examples(self, split: str) -> Examples:
        """See `SplitTask`."""

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "classification")
            pairs = zip(columns["text"], columns["text_pair"], strict=True)
            if "{text_pair}" in self.config.text and None in columns["text_pair"]:
                raise UserError(f"task.text: asks for {{text_pair}}, but {self.config.data} has single texts")
            texts = [self.config.text.format(text=text, text_pair=pair) for text, pair in pairs]
            return {
                "texts": Ragged.of(self.reader.read(texts, self.longest, f"reading {self.config.name} {split}")),
                "labels": Ragged.of([columns["label"]]),
            }

        arrays = self.tokenized("classification", split, make, text=self.config.text)
        return Examples(unpack(arrays, "texts"), {"labels": unpack(arrays, "labels").flat})

    def collate(self, examples: Examples, rows: Sequence[int], epoch: int, seed: int) -> Batch:
        """See `Task`."""
        tokens, lengths = flat(examples.texts, rows)
        labels = torch.from_numpy(examples.arrays["labels"][list(rows)]).long()
        return {"tokens": tokens, "lengths": lengths, "labels": labels}

    def targets(self, examples: Examples, rows: Sequence[int]) -> int:
        """See `Task`."""
        return len(rows)

    def loss(self, encoder: Encoder, head: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        segments = Segments.of(batch["lengths"], batch["tokens"].device)
        logits = head(mean_pool(encoder.hidden(batch["tokens"], segments), segments))
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum")

    def say(
        self, hidden: Tensor, segments: Segments, head: nn.Module, examples: Examples, rows: list[int]
    ) -> list[Any]:
        """The likeliest label of each text."""
        return head(mean_pool(hidden, segments)).argmax(-1).tolist()

    def measure(self, split: str, said: list[Any]) -> dict[str, float]:
        """See `SplitTask`."""
        gold = self.data.read(split, "classification")["label"]
        found = {"accuracy": accuracy(gold, said)}
        return {**found, "f1": f1(gold, said)} if len(self.data.label_names) == 2 else found
