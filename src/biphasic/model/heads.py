"""What fine-tuning trains on top of an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TextHead(nn.Module):
    """A label for a text, from its mean hidden state: dense, GELU, classifier, as in EuroBERT's own.

    [texts, width] to [texts, labels].
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation = nn.GELU()
        self.classifier = nn.Linear(width, labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.activation(self.dense(pooled)))


class TokenHead(nn.Module):
    """A label for each token: [tokens, width] to [tokens, labels]."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.classifier = nn.Linear(width, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(hidden)


def initialize(head: nn.Module, deviation: float, seed: int) -> None:
    """First weights: N(0, deviation) in matrices, 0 in biases; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() < 2:
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
