"""Attention over packed segments, causal or bidirectional, for any Hugging Face decoder.

The decoder's own layers call this function instead of theirs: it is registered under `NAME` with transformers, and no mask
is ever built, since the segments' lengths say all that a mask would. Works with transformers 4.57 and 5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "biphasic"


@dataclass(frozen=True)
class Segments:
    """How a flat run of tokens is cut into what attends to itself.

    `lengths` lie on the host, the tensors on the tokens' device, so that neither kernel needs a synchronisation.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """int32 [segments + 1]: where each segment begins, and the end of the last."""
    position_ids: Tensor
    """int64 [tokens]: each token's position within its segment."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Segments of the given lengths (each at least 1), one after another."""
        counts = torch.tensor(lengths, dtype=torch.int64)
        ends = counts.cumsum(0)
        starts = ends - counts
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
        position_ids = torch.arange(int(ends[-1])) - torch.repeat_interleave(starts, counts)
        return cls(
            tuple(lengths),
            cu_seqlens.to(device, non_blocking=True),
            position_ids.to(device, non_blocking=True),
        )


@functools.cache
def _flash() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return flash_attn_varlen_func


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
        ValueError: the backbone was called without segments, or with a mask, or the layer needs attention sinks.
    """
    if segments is None or is_causal is None or attention_mask is not None:
        raise ValueError(
            "this backbone attends to packed segments: call it through biphasic.model.packed.encode, which takes the "
            "padding out and says where the segments lie"
        )
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks are not supported")
    flash = _flash() if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else None
    if flash is not None:
        longest = max(segments.lengths)
        span = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        packed = flash(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            segments.cu_seqlens,
            segments.cu_seqlens,
            longest,
            longest,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=is_causal,
            window_size=span,
            softcap=softcap or 0.0,
        )
        return packed[None], None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    lengths = list(segments.lengths)
    pieces = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [_segment(q, k, v, scaling, dropout, is_causal, sliding_window, softcap) for q, k, v in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    is_causal: bool,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """One segment, [1, heads, length, head_dim] each: the reference that every kernel is held against."""
    length = query.shape[2]
    windowed = sliding_window is not None and sliding_window < length
    if not windowed and softcap is None:
        return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal, scale=scaling)
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance[None, :]
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if sliding_window is not None:
        seen = seen & (distance.abs() < sliding_window)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, seen, dropout, scale=scaling)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    weights = F.dropout(scores.float().softmax(-1).to(query.dtype), dropout)
    return weights @ value


def register() -> None:
    """Make `attn_implementation="biphasic"` known to transformers. Registering twice changes nothing."""
    from transformers.modeling_utils import AttentionInterface

    # Without an entry of this name for masks, transformers builds none.
    AttentionInterface.register(NAME, attention)
