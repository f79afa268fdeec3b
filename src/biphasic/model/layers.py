"""Compile a backbone's layers, and recompute them in the backward pass (activation checkpointing).

Neither changes parameter names or, apart from rounding, results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.compiler import config as compiler
from torch.utils.checkpoint import checkpoint

_VARIANTS = 64
"""Maximum number of compilations of a layer's forward function. Each combination of layer kind, objective, microbatch size,
and training or validation needs one."""


def compile_layers(backbone: Any) -> None:
    """Compile each decoder layer and the final norm separately. Layers of the same kind share a compilation.

    The first batch with another microbatch size or of the other objective triggers another compilation. Wrappers of layers
    (FSDP's gathering, recomputation) stay outside the compiled code.
    """
    compiler.recompile_limit = max(_VARIANTS, compiler.recompile_limit)
    # DDP's optimizer would split each layer at its buckets, and a layer has no more than one bucket to overlap.
    torch._dynamo.config.optimize_ddp = False
    final_norm = [backbone.norm] if hasattr(backbone, "norm") else []
    for module in (*backbone.layers, *final_norm):
        module.forward = torch.compile(module.forward, dynamic=False)


class _RecomputedForward:
    """A layer's forward function that, in training, stores only its inputs and is run again in the backward pass."""

    def __init__(self, layer: nn.Module):
        self.layer, self.forward = layer, layer.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self.layer.training:
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)


def recompute_layers(backbone: Any, indices: Iterable[int]) -> None:
    """Store only the inputs of the given layers (counted from 0), and recompute the layers in the backward pass.

    Call this function after `compile_layers`: the compiled forward function is recomputed as a whole. transformers' own
    gradient checkpointing would be compiled with the layer, and each recomputed layer would need its own compilation.
    """
    for index in indices:
        backbone.layers[index].forward = _RecomputedForward(backbone.layers[index])


def recomputed_layers(backbone: Any) -> int:
    """Return the number of layers that are recomputed in the backward pass."""
    return sum(isinstance(layer.forward, _RecomputedForward) for layer in backbone.layers)
