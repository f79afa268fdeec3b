"""Attention over packed segments, causal or bidirectional, for any Hugging Face decoder.

The decoder's own layers call this function instead of theirs: it is registered under `NAME` with transformers, and no mask
is ever built, since the segments' lengths say all that a mask would. Works with transformers 4.57 and 5. What computes it
is one of `BACKENDS`; all give the same numbers, within rounding.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.version import hip

from biphasic.model.segments import Segments, seen
from biphasic.model.varlen import varlen_attention

NAME = "biphasic"
BACKENDS = ("flash3", "flash2", "varlen", "flex", "sdpa", "mask")
"""`flash3`, `flash2`: the packages flash-attn-3 and flash-attn. `varlen`: PyTorch's own flash kernels. `flex`: PyTorch's
FlexAttention. `sdpa`: PyTorch's dense attention, a segment at a time, or all at once where they are equally long. `mask`:
the same with a mask of all tokens by all tokens, the reference in tests."""


class _How(NamedTuple):
    """What a layer asks of a backend: `window` 0 is none."""

    scale: float
    dropout: float
    causal: bool
    window: int
    softcap: float | None


_HALVES = (torch.float16, torch.bfloat16)


def installed(backend: str) -> bool:
    """Whether that backend's package is here and, for a kernel, a GPU that runs it."""
    if backend in ("sdpa", "mask"):
        return True
    if not torch.cuda.is_available():
        return False
    if backend == "flash3":
        hopper = torch.cuda.get_device_capability()[0] == 9
        return hopper and importlib.util.find_spec("flash_attn_interface") is not None
    if backend == "flash2":
        return importlib.util.find_spec("flash_attn") is not None
    return backend == "flex" or hip is not None or torch.cuda.get_device_capability()[0] >= 8


@functools.cache
def choose(asked: str, device: str, dtype: torch.dtype, softcap: bool = False, dropout: bool = False) -> str:
    """The backend for a layer: the one asked for, or with `auto` the first that is installed and fits.

    Args:
        asked: `auto`, or one of `BACKENDS`.
        device: type of the tokens' device.
        dtype: of queries, keys and values.
        softcap: whether scores are squashed (Gemma 2).
        dropout: whether attention weights are dropped.
    """
    if asked != "auto":
        return asked
    if device != "cuda":
        return "sdpa"
    kernels = [] if dtype not in _HALVES else ["flash2"] if softcap or dropout else ["flash3", "flash2", "varlen"]
    if not dropout:
        kernels.append("flex")
    return next((backend for backend in kernels if installed(backend)), "sdpa")


def prepare(segments: Segments, config: Any, device: str, dtype: torch.dtype, causal: bool) -> Segments:
    """Settle what the layers will read: the backend, and FlexAttention's masks.

    Args:
        segments: of the tokens; changed in place.
        config: the backbone's Hugging Face configuration.
        device: type of the tokens' device.
        dtype: of queries, keys and values.
        causal: whether a token sees only what is before it.
    """
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    dropout = bool(getattr(config, "attention_dropout", 0.0))
    segments.attention = choose(segments.attention, device, dtype, softcap, dropout)
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
    """Attend within each segment. The signature is transformers' AttentionInterface.

    Args:
        module: the attention layer that calls; unused but for the interface.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, head_dim].
        attention_mask: must be None; padding is taken out before the backbone is called.
        scaling: factor of the scores; default 1/sqrt(head_dim).
        dropout: probability of dropping an attention weight.
        segments: how the tokens are cut; reaches this function as a keyword of the backbone's forward.
        is_causal: whether a token sees only what is before it; likewise.
        sliding_window: tokens further apart than this minus one don't see each other (Mistral, Gemma 2).
        softcap: scores are squashed to ±softcap by tanh (Gemma 2).

    Returns:
        [1, tokens, heads, head_dim] and None in place of attention weights.

    Raises:
        ValueError: the backbone was called without segments, or with a mask, or the layer or its backend can't do it.
    """
    if segments is None or is_causal is None or attention_mask is not None:
        raise ValueError(
            "this backbone attends to packed segments: call it through biphasic.model.packed.encode, which takes the "
            "padding out and says where the segments lie"
        )
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks are not supported")
    # Under autocast, rotary positions and norms may have left queries and keys in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = _How(scale, dropout, is_causal, sliding_window or 0, softcap)
    backend = segments.attention
    if (backend in ("varlen", "flex") and dropout) or (backend == "varlen" and softcap is not None):
        raise ValueError(f"attention {backend} has no {'dropout' if dropout else 'softcap'}: choose another, or auto")
    if backend == "varlen":
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        found = varlen_attention(q, k, v, segments.cu_seqlens, segments.longest, is_causal, scale, how.window - 1)
        return found[None], None
    if backend == "flex":
        from biphasic.model.flex import flex

        return flex(query, key, value, segments.block_masks[how.window], scale, softcap).transpose(1, 2), None
    if backend in ("flash2", "flash3"):
        return _flash(backend, query, key, value, segments, how), None
    compute = _masked if backend == "mask" else _by_segment
    return compute(query, key, value, segments, how).transpose(1, 2), None


@functools.cache
def _flash_kernel(backend: str) -> Callable[..., Any]:
    if backend == "flash3":
        from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    else:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    return flash_attn_varlen_func


# These are kernels of their own whatever surrounds them, and `lengths` differ in every batch: a compiled layer ends before
# them and begins again behind them.
@torch.compiler.disable
def _flash(backend: str, query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: _How) -> Tensor:
    longest = max(segments.lengths)
    found = _flash_kernel(backend)(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=segments.cu_seqlens,
        cu_seqlens_k=segments.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=how.scale,
        causal=how.causal,
        window_size=(how.window - 1, how.window - 1),
        softcap=how.softcap or 0.0,
        **({"dropout_p": how.dropout} if backend == "flash2" else {}),
    )
    # Some versions of flash-attn-3 give the normalisers too.
    return (found[0] if isinstance(found, tuple) else found)[None]


@torch.compiler.disable
def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: _How) -> Tensor:
    key, value = _for_each_query_head(query, key, value)
    if segments.uniform:
        length = segments.lengths[0]
        rows = [x.unflatten(2, (-1, length))[0].transpose(0, 1) for x in (query, key, value)]
        return _dense(rows[0], rows[1], rows[2], how).transpose(0, 1).flatten(1, 2)[None]
    lengths = list(segments.lengths)
    pieces = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_dense(q, k, v, how) for q, k, v in pieces], dim=2)


def _dense(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Segments of one length, [segments, heads, length, head_dim] each."""
    length = query.shape[2]
    if how.softcap is None and not 0 < how.window < length:
        return F.scaled_dot_product_attention(query, key, value, None, how.dropout, how.causal, scale=how.scale)
    return _scored(query, key, value, seen(length, how.causal, how.window, query.device), how)


@torch.compiler.disable
def _masked(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: _How) -> Tensor:
    key, value = _for_each_query_head(query, key, value)
    together = segments.owner[:, None] == segments.owner[None, :]
    return _scored(query, key, value, together & seen(query.shape[2], how.causal, how.window, query.device), how)


def _for_each_query_head(query: Tensor, *others: Tensor) -> Iterable[Tensor]:
    groups = query.shape[1] // others[0].shape[1]
    return others if groups == 1 else [x.repeat_interleave(groups, dim=1) for x in others]


def _scored(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: _How) -> Tensor:
    if how.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, mask, how.dropout, scale=how.scale)
    scores = how.softcap * torch.tanh(query @ key.transpose(2, 3) * how.scale / how.softcap)
    weights = F.dropout(scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(query.dtype), how.dropout)
    return weights @ value


def register() -> None:
    """Make `attn_implementation="biphasic"` known to transformers. Registering twice changes nothing."""
    from transformers.modeling_utils import AttentionInterface

    # Without an entry of this name for masks, transformers builds none.
    AttentionInterface.register(NAME, attention)
