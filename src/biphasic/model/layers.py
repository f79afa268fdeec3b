"""Change how a backbone's layers are computed: compiled, with a sum in bf16, recomputed in the backward pass.

Nothing here changes parameter names or, apart from rounding, results.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import config as compiler
from torch.utils.checkpoint import checkpoint

_VARIANTS = 64
"""Maximum number of compilations of a layer's forward function: one for each combination of layer kind, objective,
microbatch size, and training or validation."""


def compile_layers(backbone: Any, mode: str = "default") -> None:
    """Compile each decoder layer and the final norm separately. Layers of the same kind share a compilation.

    A new microbatch size or objective triggers another one. FSDP's hooks and recomputation stay outside the compiled code.
    """
    compiler.recompile_limit = max(_VARIANTS, compiler.recompile_limit)
    # DDPOptimizer would split each layer's graph at DDP's buckets, but a layer has at most one bucket to overlap.
    torch._dynamo.config.optimize_ddp = False
    # ModernBERT and Phi have other names for it than most families.
    names = ("norm", "final_norm", "final_layernorm")
    final_norm = [getattr(backbone, name) for name in names if hasattr(backbone, name)]
    for module in (*backbone.layers, *final_norm):
        module.forward = torch.compile(module.forward, dynamic=False, mode=mode)


def _rounded_forward(forward: Callable[..., Any], hidden: Tensor, *inputs: Any, **named: Any) -> Any:
    return forward(hidden.bfloat16(), *inputs, **named)


def round_residual(backbone: Any) -> None:
    """Sum the layers' outputs (the residual stream) in bf16. The rotary tables stay in fp32.

    Call this after `compile_layers`, so that the first layer shares the others' compilation, and before `recompute_layers`.
    """
    first = backbone.layers[0]
    first.forward = functools.partial(_rounded_forward, first.forward)


def _recomputed_forward(layer: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, **named) if layer.training else forward(*inputs, **named)


def recompute_layers(backbone: Any, indices: Iterable[int]) -> None:
    """Store only the inputs of the given layers (counted from 0), and recompute the layers in the backward pass.

    Call this after `compile_layers`. transformers' own gradient checkpointing would be compiled with each layer.
    """
    for index in indices:
        layer = backbone.layers[index]
        layer.forward = functools.partial(_recomputed_forward, layer, layer.forward)


def recomputed_layers(backbone: Any) -> int:
    """Return the number of layers that are recomputed in the backward pass."""
    return sum(getattr(layer.forward, "func", None) is _recomputed_forward for layer in backbone.layers)
