"""Attention within segments by PyTorch's FlexAttention: which blocks of tokens see each other, and how within a block.

`create_block_mask` would look at every pair of tokens. Segments follow one another, so what two blocks have in common
shows in their first and last tokens, and the mask of 32,768 tokens comes from 256 x 256 comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from biphasic.model.segments import Segments

BLOCK = 128


def block_mask(segments: Segments, causal: bool, window: int) -> BlockMask:
    """Who sees whom.

    Args:
        segments: of the tokens.
        causal: whether a token sees only what is before it.
        window: tokens this far apart, or further, don't see each other; 0: no limit.
    """
    owner, tokens = segments.owner, segments.owner.shape[0]
    first, last = owner[::BLOCK], torch.cat([owner[BLOCK - 1 : -1 : BLOCK], owner[-1:]])
    row, column = (torch.arange(len(first), device=owner.device)[at] for at in ((..., None), (None, ...)))
    common = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    one = first == last
    # Each token of the one sees each of the other. A last block that isn't full needs its mask.
    whole = common & one[:, None] & one[None, :]
    if tokens % BLOCK:
        whole[-1] = False
        whole[:, -1] = False
    if causal:
        common &= row >= column
        whole &= row > column
    if window:
        apart = (row - column).abs()
        common &= (apart - 1) * BLOCK + 1 < window
        whole &= (apart + 1) * BLOCK - 1 < window
    return BlockMask.from_kv_blocks(
        *_ordered(common & ~whole), *_ordered(whole), BLOCK, _rule(owner, causal, window), (tokens, tokens)
    )


def _rule(owner: Tensor, causal: bool, window: int) -> Callable[..., Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = owner[query] == owner[key]
        if causal:
            found = found & (query >= key)
        if window:
            found = found & ((query - key).abs() < window)
        return found

    return seen


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries sees, and which, these first."""
    count = blocks.sum(1, dtype=torch.int32)
    which = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return count[None, None], which[None, None]


@functools.cache
def _squash(softcap: float) -> Callable[..., Tensor]:
    def squash(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return squash


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Attend as the mask says.

    Args:
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, head_dim].
        mask: of these tokens.
        scale: factor of the scores; default 1/sqrt(head_dim).
        softcap: scores are squashed to ±softcap by tanh.

    Returns:
        [1, heads, tokens, head_dim].
    """
    # Outside a compiled layer the kernel is still compiled, on GPUs: without it, all scores would be held.
    call = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else _compiled()
    squash = None if softcap is None else _squash(softcap)
    found = call(query, key, value, squash, mask, scale, query.shape[1] != key.shape[1])
    assert isinstance(found, Tensor)
    return found
