"""Attention over packed segments, causal or bidirectional, for any Hugging Face decoder.

The decoder's own layers call `attention` instead of their own function: it is registered with transformers under `NAME`. No
mask is built, because the segments' lengths already hold everything that a mask would say. Every backend computes the same
numbers, within rounding.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.version import hip

from biphasic.model.segments import Segments, visible

NAME = "biphasic"
BACKENDS = ("varlen", "flash2", "flex", "sdpa")
"""`varlen`: PyTorch's variable-length kernels (cuDNN, FlashAttention 2; FlashAttention 3 or 4 where one is installed).
`flash2`: the package flash-attn. `flex`: FlexAttention. `sdpa`: dense attention, one segment at a time."""


class Scoring(NamedTuple):
    """How a layer scores a query against a key."""

    scale: float
    dropout: float
    """Probability of dropping an attention weight."""
    causal: bool
    window: int
    """Tokens this far apart, or further, don't see each other; 0: no limit."""
    softcap: float | None
    """Scores are squashed to ±softcap by tanh."""

    @property
    def window_size(self) -> tuple[int, int]:
        """How many tokens to the left and to the right a query sees, as FlashAttention counts them; -1: all."""
        left = self.window - 1
        return left, 0 if self.causal else left


_HALF_PRECISION = (torch.float16, torch.bfloat16)
# PyTorch's name of the kernels, the module that holds them, and the major compute capabilities that run them.
_FLASH_KERNELS = (("FA4", "flash_attn.cute", (9, 10)), ("FA3", "flash_attn_interface", (9,)))
# PyTorch 2.11 accepts fewer key heads than query heads without this argument.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class NotPackedError(ValueError):
    """The attention function was called without segments, or with a mask."""


def installed(backend: str) -> bool:
    """Whether the backend runs on this machine: its package is installed and there is a GPU that runs it."""
    if backend == "sdpa":
        return True
    if not torch.cuda.is_available():
        return False
    if backend == "flash2":
        # Not `flash_attn` itself: the package flash-attn-4 lies in a folder of that name too.
        return importlib.util.find_spec("flash_attn_2_cuda") is not None
    return backend == "flex" or hip is not None or torch.cuda.get_device_capability()[0] >= 8


@functools.cache
def choose(requested: str, device: str, dtype: torch.dtype, softcap: bool = False, dropout: bool = False) -> str:
    """The backend for a layer: the requested one, or with `auto` the first that is installed and fits.

    Args:
        requested: `auto`, or one of `BACKENDS`.
        device: type of the tokens' device.
        dtype: of queries, keys and values.
        softcap: whether scores are squashed (Gemma 2).
        dropout: whether attention weights are dropped.
    """
    if requested != "auto":
        return requested
    if device != "cuda":
        return "sdpa"
    fitting = []
    if dtype in _HALF_PRECISION:
        fitting.append("flash2" if softcap or dropout else "varlen")
    if not dropout:
        fitting.append("flex")
    return next((backend for backend in fitting if installed(backend)), "sdpa")


@functools.cache
def activate_flash_kernels() -> str:
    """Put FlashAttention 4 or 3 behind PyTorch's attention, where one is installed and the GPU runs it.

    PyTorch prefers cuDNN for segments, so cuDNN's attention is turned off then: whoever installs another one wants it used.

    Returns:
        The kernels in use: `FA4`, `FA3`, or `cuDNN or FA2`, between which PyTorch chooses.
    """
    if torch.cuda.is_available() and hip is None:
        for name, module, capabilities in _FLASH_KERNELS:
            if torch.cuda.get_device_capability()[0] not in capabilities or not _has_module(module):
                continue
            try:
                activate_flash_attention_impl(name)
            except (ImportError, OSError, RuntimeError) as error:
                warnings.warn(f"attention: {module} can't be used ({error}); PyTorch's own kernels run", stacklevel=2)
                continue
            torch.backends.cuda.enable_cudnn_sdp(False)
            break
    return current_flash_attention_impl() or "cuDNN or FA2"


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package around it
        return False


def prepare(segments: Segments, config: Any, device: str, dtype: torch.dtype, causal: bool) -> Segments:
    """Set what the layers will read: the backend, and FlexAttention's block masks.

    Args:
        segments: of the tokens; changed in place.
        config: the backbone's Hugging Face configuration.
        device: type of the tokens' device.
        dtype: of queries, keys and values.
        causal: whether a token sees only itself and what precedes it.
    """
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    dropout = bool(getattr(config, "attention_dropout", 0.0))
    segments.attention = choose(segments.attention, device, dtype, softcap, dropout)
    if segments.attention == "varlen":
        activate_flash_kernels()
    if segments.attention == "flex":
        from biphasic.model.flex import block_mask

        window = getattr(config, "sliding_window", None) or 0
        segments.block_masks = {w: block_mask(segments, causal, w) for w in {0, window}}
    return segments


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend within each segment. The signature is that of transformers' AttentionInterface.

    Args:
        module: the attention layer that calls; required by the interface, not read.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, head_dim].
        attention_mask: must be None; padding is removed before the backbone is called.
        scaling: factor of the scores; default 1/sqrt(head_dim).
        dropout: probability of dropping an attention weight.
        segments: how the tokens are cut; passed as a keyword of the backbone's forward.
        is_causal: whether a token sees only itself and what precedes it; passed likewise.
        sliding_window: tokens this far apart, or further, don't see each other (Mistral, Gemma 2).
        softcap: scores are squashed to ±softcap by tanh (Gemma 2).

    Returns:
        [1, tokens, heads, head_dim], and None in place of attention weights.

    Raises:
        NotPackedError: the backbone was called without segments or with a mask.
        ValueError: the backend lacks what the layer needs.
    """
    if segments is None or is_causal is None or attention_mask is not None:
        raise NotPackedError(
            "this backbone attends to packed segments: call it through biphasic.model.packed.encode, which passes the "
            "segments and no padding"
        )
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks are not supported")
    backend = segments.attention
    if (backend in ("varlen", "flex") and dropout) or (backend == "varlen" and softcap is not None):
        raise ValueError(f"attention {backend} has no {'dropout' if dropout else 'softcap'}: choose another, or auto")
    # Under autocast, rotary positions and norms may have left queries and keys in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, dropout, is_causal, sliding_window or 0, softcap)
    return COMPUTE[backend](query, key, value, segments, scoring), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    q, k, v = _flat(query, key, value)
    # The same tensor object for queries and keys: cuDNN's causal kernels take nothing else.
    cu_seqlens, longest = segments.cu_seqlens, segments.longest
    output = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest,
        scale=scoring.scale, window_size=scoring.window_size, **_GROUPED,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output[None]


def _flash2(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    q, k, v = _flat(query, key, value)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=segments.cu_seqlens,
        # Another tensor object: a compiled layer would be cut in two if one tensor were passed twice (flash-attn 2.8).
        cu_seqlens_k=segments.cu_seqlens.view(-1),
        max_seqlen_q=segments.longest,
        max_seqlen_k=segments.longest,
        dropout_p=scoring.dropout,
        softmax_scale=scoring.scale,
        causal=scoring.causal,
        window_size=scoring.window_size,
        softcap=scoring.softcap or 0.0,
    )[None]


def _flat(*given: Tensor) -> list[Tensor]:
    """[1, heads, tokens, head_dim] to contiguous [tokens, heads, head_dim], whose gradients are laid out alike."""
    return [x[0].transpose(0, 1).contiguous() for x in given]


def _flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    from biphasic.model.flex import flex

    mask = segments.block_masks[scoring.window]
    return flex(query, key, value, mask, scoring.scale, scoring.softcap).transpose(1, 2)


# The lengths differ in every batch: compiled in, they would mean a compilation for each.
@torch.compiler.disable
def _sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if segments.uniform:
        length = segments.lengths[0]
        q, k, v = (x.unflatten(2, (-1, length))[0].transpose(0, 1) for x in (query, key, value))
        return _dense(q, k, v, scoring).transpose(1, 2).flatten(0, 1)[None]
    lengths = list(segments.lengths)
    pieces = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_dense(q, k, v, scoring) for q, k, v in pieces], dim=2).transpose(1, 2)


def _dense(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Segments of one length, [segments, heads, length, head_dim] each."""
    length = query.shape[2]
    if scoring.softcap is None and not 0 < scoring.window < length:
        return F.scaled_dot_product_attention(
            query, key, value, None, scoring.dropout, scoring.causal, scale=scoring.scale
        )
    return masked(query, key, value, visible(length, scoring.causal, scoring.window, query.device), scoring)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Dense attention under a mask.

    Args:
        query: [batch, heads, length, head_dim].
        key: the same shape.
        value: the same shape.
        mask: bool [length, length], true where a query (first) sees a key.
        scoring: of these only scale, dropout and softcap are read.
    """
    if scoring.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scoring.dropout, scale=scoring.scale)
    scores = scoring.softcap * torch.tanh(query @ key.transpose(2, 3) * scoring.scale / scoring.softcap)
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(query.dtype)
    return F.dropout(weights, scoring.dropout) @ value


COMPUTE: dict[str, Callable[..., Any]] = {
    "varlen": _varlen,
    "flash2": _flash2,
    "flex": _flex,
    "sdpa": _sdpa,
}
"""By backend, a function of queries, keys, values ([1, heads or kv_heads, tokens, head_dim]), `Segments` and `Scoring`; it
returns [1, tokens, heads, head_dim]."""


def register() -> None:
    """Make `attn_implementation="biphasic"` known to transformers. Registering twice changes nothing."""
    from transformers.modeling_utils import AttentionInterface

    # transformers builds no mask for a name that it has no mask function for.
    AttentionInterface.register(NAME, attention)
