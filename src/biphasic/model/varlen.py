"""PyTorch's own flash kernels on segments of varying length, as one operator that torch.compile can see through.

`torch.nn.functional.scaled_dot_product_attention` reaches these kernels for segments only by nested tensors, and
`torch.nn.attention.varlen` exists from PyTorch 2.10 on. The operators below both have had one signature from 2.7 on
(read in 2.7.0 and 2.11.0). On a CPU, which has no such kernel, each segment is computed by itself, its
weights again in the backward pass: for tests of everything around the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.version import hip

from biphasic.model.segments import seen

_ALL = -1
"""The kernels' word for a window without limit."""


@torch.library.custom_op("biphasic::varlen_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    if not query.is_cuda:
        out = _one_by_one(query, key, value, cu_seqlens, causal, scale, window)
        return out, _logsumexp_like(query, cu_seqlens, longest)
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(  # pyright: ignore[reportCallIssue]
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False, scale=scale,
        window_size_left=window, window_size_right=_right(causal, window),
    )  # fmt: skip
    return out, logsumexp


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _logsumexp_like(query, cu_seqlens, longest)


@torch.library.custom_op("biphasic::varlen_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not query.is_cuda:
        return _one_by_one_backward(grad, query, key, value, cu_seqlens, causal, scale, window)
    # Without dropout, the kernel reads no random state.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    found = torch.ops.aten._flash_attention_backward(  # pyright: ignore[reportCallIssue]
        grad.contiguous(), query, key, value, out, logsumexp, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, state,
        torch.empty(0, device=query.device), scale=scale, window_size_left=window,
        window_size_right=_right(causal, window),
    )  # fmt: skip
    return found[0], found[1], found[2]


@_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 5)


_forward.register_autograd(_differentiate, setup_context=_remember)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, scale: float, window: int
) -> Tensor:
    """Attend within each segment.

    Args:
        query: bf16 or fp16 on a GPU, [tokens, heads, head_dim], head_dim a multiple of 8 up to 256.
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, head_dim].
        cu_seqlens: int32 [segments + 1].
        longest: tokens that no segment exceeds.
        causal: whether a token sees only what is before it.
        scale: factor of the scores.
        window: how far a token sees to either side; -1: everything.

    Returns:
        [tokens, heads, head_dim].
    """
    given = (x.contiguous() for x in (query, key, value))
    return _forward(*given, cu_seqlens, longest, causal, scale, window)[0]


def _right(causal: bool, window: int) -> int:
    return 0 if causal and window != _ALL else window


def _logsumexp_like(query: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    tokens, heads, _ = query.shape
    by_row = (cu_seqlens.shape[0] - 1, heads, longest)  # AMD's kernels
    return query.new_empty(by_row if hip else (heads, tokens), dtype=torch.float32)


def _weights(query: Tensor, key: Tensor, causal: bool, scale: float, window: int) -> Tensor:
    """Attention weights of one segment: [heads, groups, length, head_dim] and [heads, 1, length, head_dim] to
    [heads, groups, length, length]."""
    # This window counts from 0, that one from 1.
    mask = seen(query.shape[2], causal, window + 1, query.device)
    scores = (query @ key.transpose(2, 3)).float() * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)


def _cut(x: Tensor, kv_heads: int, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """[tokens, heads, head_dim] to a [kv_heads, heads of each, length, head_dim] for each segment."""
    return x.unflatten(1, (kv_heads, -1)).movedim(0, 2).split(cu_seqlens.diff().tolist(), 2)


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces, 2).movedim(2, 0).flatten(1, 2).contiguous()


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, causal: bool, scale: float, window: int
) -> Tensor:
    pieces = zip(*(_cut(x, key.shape[1], cu_seqlens) for x in (query, key, value)), strict=True)
    return _joined([_weights(q, k, causal, scale, window) @ v for q, k, v in pieces])


def _one_by_one_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    pieces = zip(*(_cut(x, key.shape[1], cu_seqlens) for x in (grad, query, key, value)), strict=True)
    for g, q, k, v in pieces:
        weights = _weights(q, k, causal, scale, window)
        along = g @ v.transpose(2, 3)
        slope = weights * (along - (along * weights).sum(-1, keepdim=True)) * scale
        found[0].append(slope @ k)
        found[1].append((slope.transpose(2, 3) @ q).sum(1, keepdim=True))
        found[2].append((weights.transpose(2, 3) @ g).sum(1, keepdim=True))
    return _joined(found[0]), _joined(found[1]), _joined(found[2])
