"""Classification heads that fine-tuning trains on top of an encoder."""

from collections import OrderedDict

import torch
from torch import nn


class TextHead(nn.Sequential):
    """Head that classifies mean hidden states with EuroBERT's layers, from [texts, width] to logits [texts, labels]."""

    def __init__(self, width: int, labels: int):
        layers = {"dense": nn.Linear(width, width), "activation": nn.GELU(), "classifier": nn.Linear(width, labels)}
        super().__init__(OrderedDict(layers))


class TokenHead(nn.Sequential):
    """Linear head that classifies hidden states, from [tokens, width] to logits [tokens, labels]."""

    classifier: nn.Linear

    def __init__(self, width: int, labels: int):
        super().__init__(OrderedDict(classifier=nn.Linear(width, labels)))


def initialize_head(head: nn.Module, deviation: float, seed: int) -> None:
    """Draw weight matrices from N(0, deviation^2), depending only on the seed, and set biases to 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() < 2:
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
