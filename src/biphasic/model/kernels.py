"""How a backbone's layers are computed: compiled, recomputed in the backward pass.

None of it changes what is computed, beyond rounding, nor the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.compiler import config as compiler
from torch.utils.checkpoint import checkpoint

_VARIANTS = 64
"""Compiled versions of a layer that may exist: kinds of layers x phases x training or validation x sizes of microbatches."""


def compile_layers(backbone: Any) -> None:
    """Compile each decoder layer, and the final norm, by itself: layers of one kind share one compilation.

    A microbatch of another size, and the other phase, is compiled once more, when it first comes. What is wrapped around
    layers (FSDP's gathering, recomputation) stays outside.
    """
    compiler.recompile_limit = max(_VARIANTS, compiler.recompile_limit)
    final_norm = [backbone.norm] if hasattr(backbone, "norm") else []
    for module in (*backbone.layers, *final_norm):
        module.forward = torch.compile(module.forward, dynamic=False)


class _Recomputed:
    """A layer's forward that keeps only its inputs in training, and runs again in the backward pass."""

    def __init__(self, layer: nn.Module):
        self.layer, self.forward = layer, layer.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self.layer.training:
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)


def recompute_layers(backbone: Any, which: Iterable[int]) -> None:
    """Keep only the inputs of those layers (counted from 0) for the backward pass, and compute them again in it.

    transformers' own gradient checkpointing sits within the forward that `compile_layers` compiles, and would compile each
    layer that is recomputed apart from the others. Call this after `compile_layers`.
    """
    for index in which:
        backbone.layers[index].forward = _Recomputed(backbone.layers[index])


def recomputed(backbone: Any) -> int:
    """How many layers are computed again in the backward pass."""
    return sum(isinstance(layer.forward, _Recomputed) for layer in backbone.layers)
