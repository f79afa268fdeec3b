"""Change how a backbone's layers are computed: compiled, recomputed in the backward pass, with fused matrix products.

Nothing here changes parameter names or, apart from rounding, results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import config as compiler
from torch.utils.checkpoint import checkpoint

_VARIANTS = 64
"""Maximum number of compilations of a layer's forward function: one for each combination of layer kind, objective,
microbatch size, and training or validation."""


def compile_layers(backbone: Any, mode: str = "default") -> None:
    """Compile each decoder layer and the final norm separately. Layers of the same kind share a compilation.

    The first batch with a new microbatch size or objective triggers another compilation. FSDP's hooks and recomputation
    stay outside the compiled code. `mode` is that of torch.compile.
    """
    compiler.recompile_limit = max(_VARIANTS, compiler.recompile_limit)
    # DDPOptimizer would split each layer's graph at DDP's buckets, but a layer has at most one bucket to overlap.
    torch._dynamo.config.optimize_ddp = False
    # ModernBERT and Phi have other names for it than most families.
    names = ("norm", "final_norm", "final_layernorm")
    final_norm = [getattr(backbone, name) for name in names if hasattr(backbone, name)]
    for module in (*backbone.layers, *final_norm):
        module.forward = torch.compile(module.forward, dynamic=False, mode=mode)


FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that have the same input, in most families of transformers."""


class _FusedLinear(nn.Linear):
    """One of several linear layers with the same input, whose outputs are computed by one matrix product.

    The first of them that gets an input computes the outputs of all. Weights and their gradients stay separate. The state
    is in modules and not in another object, since layers with different objects wouldn't share a compilation.
    """

    layers: Sequence[nn.Linear]
    """All of them, in the order of their weights in the product."""
    pending: tuple[Tensor, Tensor] | None
    """Input and output, until the output is returned."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this layer's output."""
        if self.pending is None or self.pending[0] is not input:
            device = input.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
            # Cast one by one, so that a compiled layer writes each weight into its place in one pass.
            weight = torch.cat([layer.weight.to(dtype) for layer in self.layers])
            bias = None if self.bias is None else torch.cat([layer.bias.to(dtype) for layer in self.layers])
            outputs = F.linear(input, weight, bias).split([layer.out_features for layer in self.layers], dim=-1)
            for layer, output in zip(self.layers, outputs, strict=True):
                layer.pending = input, output
        assert self.pending is not None
        output, self.pending = self.pending[1], None
        return output


def fuse_projections(backbone: Any) -> int:
    """Compute each layer's queries, keys and values by one matrix product, and the MLP's gate and up projections by one.

    Returns the number of fused products; 0 for families whose layers have other names.
    """
    count = 0
    for module in list(backbone.layers.modules()):
        for names in FUSED_PROJECTIONS:
            layers = [getattr(module, name, None) for name in names]
            if (
                any(type(layer) is not nn.Linear for layer in layers)
                or len({layer.bias is None for layer in layers}) > 1
            ):
                continue
            for layer in layers:
                layer.__class__ = _FusedLinear
                layer.layers, layer.pending = layers, None
            count += 1
    return count


def _rounded_forward(forward: Callable[..., Any], hidden: Tensor, *inputs: Any, **named: Any) -> Any:
    return forward(hidden.bfloat16(), *inputs, **named)


def round_residual(backbone: Any) -> None:
    """Sum the layers' outputs (the residual stream) in bf16. The rotary tables stay in fp32.

    Call this after `compile_layers`, so that the first layer shares the others' compilation, and before `recompute_layers`.
    """
    first = backbone.layers[0]
    first.forward = functools.partial(_rounded_forward, first.forward)


def _recomputed_forward(layer: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Run a layer's forward function. In training, store only its inputs, and run it again in the backward pass."""
    return checkpoint(forward, *inputs, use_reentrant=False, **named) if layer.training else forward(*inputs, **named)


def recompute_layers(backbone: Any, indices: Iterable[int]) -> None:
    """Store only the inputs of the given layers (counted from 0), and recompute the layers in the backward pass.

    Call this after `compile_layers`, so that compiled forward functions are recomputed as a whole. transformers' own
    gradient checkpointing would be compiled with the layer, and each recomputed layer would need its own compilation.
    """
    for index in indices:
        layer = backbone.layers[index]
        layer.forward = functools.partial(_recomputed_forward, layer, layer.forward)


def recomputed_layers(backbone: Any) -> int:
    """Return the number of layers that are recomputed in the backward pass."""
    return sum(getattr(layer.forward, "func", None) is _recomputed_forward for layer in backbone.layers)
