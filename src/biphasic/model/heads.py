"""Classification heads that fine-tuning trains on top of an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TextHead(nn.Module):
    """Classify texts by their mean hidden state, with a dense layer, GELU and a linear layer as in EuroBERT's own class.

    Maps [texts, width] to [texts, labels].
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation = nn.GELU()
        self.classifier = nn.Linear(width, labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return logits [texts, labels]."""
        return self.classifier(self.activation(self.dense(pooled)))


class TokenHead(nn.Module):
    """Classify tokens with a linear layer, from [tokens, width] to [tokens, labels]."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.classifier = nn.Linear(width, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [tokens, labels]."""
        return self.classifier(hidden)


def initialize_head(head: nn.Module, deviation: float, seed: int) -> None:
    """Draw weight matrices from N(0, deviation^2), depending on the seed alone, and set biases to 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() < 2:
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
