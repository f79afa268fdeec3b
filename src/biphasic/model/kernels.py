"""Choose the kernels of PyTorch's attention over packed segments, and try them before they are used.

Imports torch only, so that benchmarks/gpu.py runs without other packages.
"""

import importlib
import importlib.util
import inspect
import itertools
import os
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.version import hip

from biphasic.errors import UserError, first_line
from biphasic.model.segments import visibility_mask

varlen_attn: Any = None
"""PyTorch's attention over segments of any length; None before torch 2.10, on which other backends compute it."""
with suppress(ImportError):
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn

KERNELS = {"fa4": "FlashAttention 4", "fa3": "FlashAttention 3", "cudnn": "cuDNN", "fa2": "FlashAttention 2"}
"""Kernels by their name in a YAML, in the order in which `auto` tries them."""
# The modules of kernels that are not part of PyTorch, and the major compute capabilities that support them.
_MODULES = {"fa4": "flash_attn.cute", "fa3": "flash_attn_interface"}
_CAPABILITIES = {"fa4": (9, 10), "fa3": (9,), "cudnn": (9, 10)}
# In PyTorch 2.11, grouped-query attention needs no argument.
_NEEDS_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
GQA_OPTIONS: dict[str, Any] = {"enable_gqa": True} if _NEEDS_GQA else {}
_TRIED_LENGTHS = (150, 0, 1, 90, 0)
_TOLERANCE = 2e-2
"""Maximum error of bf16 results, relative to the norm of those in fp32."""
_selected: str | None = None


def select_kernels(hf_config: Any, requested: str = "auto") -> str:
    """Set the kernels of PyTorch's variable-length attention, for training on packed rows, and return their full name.

    Kernels are first tried on a small forward and backward pass, because packages may be broken, and some kernels are
    generated only when they are first used. `requested` is `auto` or a key of `KERNELS`. With `auto`, kernels that fail
    are skipped with a warning. Raises a UserError if the requested ones fail, or all.
    """
    global _selected
    for name in KERNELS if requested == "auto" else [requested]:
        missing = _missing_requirement(name)
        problem = missing or _activation_problem(name, hf_config)
        if problem is None:
            _selected = name
            return KERNELS[name]
        if requested != "auto" or name == "fa2":
            raise UserError(f"compute.varlen_kernels: {KERNELS[name]} can't be used: {problem}; choose other kernels, "
                            "or set compute.attention: flex")  # fmt: skip
        if missing is None:
            warnings.warn(f"attention: {KERNELS[name]} can't be used ({problem}); trying other kernels", stacklevel=2)
    raise AssertionError("FlashAttention 2 is the last")


def avoid_plans() -> None:
    """Turn off cuDNN's attention, unless `select_kernels` has chosen it.

    cuDNN takes about 50 ms to prepare a plan for each combination of number of segments, number of tokens, and maximum
    length (PyTorch, pull request 191576), of which nearly every batch of fine-tuning and evaluation has a new one.
    """
    if _selected != "cudnn":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _missing_requirement(name: str) -> str | None:
    if name == "fa2":
        return None
    if hip is not None or torch.cuda.get_device_capability()[0] not in _CAPABILITIES[name]:
        return "this GPU doesn't support them"
    if name in _MODULES:
        return None if _has_module(_MODULES[name]) else f"the module {_MODULES[name]} isn't installed"
    if (torch.backends.cudnn.version() or 0) < 92500:  # older ones return NaN (cudnn-frontend, issue 943)
        return "cuDNN is older than 9.25, the first that takes empty segments"
    if torch.are_deterministic_algorithms_enabled():
        return "compute.deterministic is true, and PyTorch doesn't say whether their backward pass is deterministic"
    return None


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False


def _activation_problem(name: str, hf_config: Any) -> str | None:
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    try:
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        if name in _MODULES:
            activate_flash_attention_impl(name.upper())
        else:
            restore_flash_attention_impl(_raise_warn=False)
        ran = try_attention(hf_config, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # generated kernels may raise anything
        return f"{type(error).__name__}: {first_line(error)[:200]}"
    return None if ran == KERNELS[name] else f"PyTorch ran {ran}"


def try_attention(hf_config: Any, device: torch.device) -> str:
    """Check variable-length attention and its gradients on short segments; return the kernels that ran, by a profile.

    Some segments are empty, as in batches (`Segments.of`). Raises a RuntimeError if results differ from dense attention in
    fp32. The kernels may raise other errors.
    """
    from torch.nn.attention import current_flash_attention_impl

    heads, tokens = hf_config.num_attention_heads, sum(_TRIED_LENGTHS)
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    generator = torch.Generator().manual_seed(0)
    size = head_dim(hf_config)
    shapes = [(tokens, count, size) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, upstream = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    ends = torch.tensor(list(itertools.accumulate(_TRIED_LENGTHS, initial=0)), dtype=torch.int32, device=device)
    longest, scale = max(_TRIED_LENGTHS), size**-0.5
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints lines when it starts and stops
    with profile(activities=[ProfilerActivity.CPU]) as events:
        for causal in (True, False):
            leaves = query, key, value = [x.clone().requires_grad_() for x in inputs]
            window = (-1, 0) if causal else (-1, -1)
            output = varlen_attn(
                query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **GQA_OPTIONS
            )
            results = [output.detach(), *torch.autograd.grad(output, leaves, upstream)]
            for result, expected in zip(results, _dense(inputs, upstream, causal), strict=True):
                # `not <=` instead of `>`, so that NaN is an error.
                if not float((result.float() - expected).norm()) <= _TOLERANCE * float(expected.norm()):
                    raise RuntimeError(f"wrong results ({'causal' if causal else 'bidirectional'})")
    names = {event.key for event in events.key_averages()}
    if "aten::_cudnn_attention_forward" in names:
        return KERNELS["cudnn"]
    return KERNELS[(current_flash_attention_impl() or "fa2").lower()]


def _dense(inputs: list[Tensor], upstream: Tensor, causal: bool) -> list[Tensor]:
    """Return the output and gradients of dense attention with a mask, fp32 [tokens, heads, head_dim]."""
    leaves = [x.float().requires_grad_() for x in inputs]
    mask = torch.block_diag(*(visibility_mask(length, causal, 0, upstream.device) for length in _TRIED_LENGTHS))
    query, key, value = (x.transpose(0, 1)[None] for x in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)[0].transpose(0, 1)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.float())]


def head_dim(hf_config: Any) -> int:
    """Return the size of an attention head, from a Hugging Face configuration."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
