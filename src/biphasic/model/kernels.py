"""How a backbone's layers are computed: compiled, with liger-kernel's fused kernels, recomputed in the backward pass.

None of it changes what is computed, beyond rounding, nor the names of parameters.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_VARIANTS = 64
"""Compiled versions of a layer that may exist: kinds of layers x phases x training or validation x sizes of microbatches."""


def compile_layers(backbone: Any) -> None:
    """Compile each decoder layer, and the last norm, by itself: layers of one kind share one compilation.

    A microbatch of another size, and the other phase, is compiled once more, when it first comes. What is wrapped around
    layers (FSDP's gathering, recomputation) stays outside.
    """
    import torch._dynamo as dynamo

    name = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(dynamo.config, name, max(_VARIANTS, getattr(dynamo.config, name)))
    for module in (*backbone.layers, backbone.norm):
        module.forward = torch.compile(module.forward, dynamic=False)


def recompute_layers(backbone: Any, which: Iterable[int]) -> None:
    """Keep only the inputs of those layers (counted from 0) for the backward pass, and compute them again in it."""
    for index in which:
        layer = backbone.layers[index]
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def recomputed(backbone: Any) -> int:
    """How many layers are computed again in the backward pass."""
    return sum(getattr(layer, "gradient_checkpointing", False) for layer in backbone.layers)


def liger_installed() -> bool:
    """Whether liger-kernel is here, and a GPU that runs its kernels."""
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def use_liger(backbone: nn.Module) -> None:
    """Replace RMSNorm, rotary positions and the gated MLP by liger-kernel's, in this backbone.

    It also replaces transformers' own parts of that family: models that are built later in this process have its kernels
    too, and don't run on a CPU.

    Raises:
        ValueError: liger-kernel knows no such family.
    """
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    family: str = backbone.config.model_type  # pyright: ignore
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get("llama" if family == "eurobert" else family)
    if apply is None:
        raise ValueError(f"liger-kernel has no kernels for {family}")
    apply(model=backbone, cross_entropy=False, fused_linear_cross_entropy=False)
