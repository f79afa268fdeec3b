"""Compute attention within segments by PyTorch's FlexAttention, with block masks that are cheap to build.

PyTorch's `create_block_mask` compares every pair of tokens. Segments are contiguous, so the first and last tokens of
two blocks show whether the blocks share a segment: a mask for 32,768 tokens takes 256 x 256 comparisons.
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
    """Build the block mask for attention within segments. With a `window`, tokens attend only to tokens closer than this."""
    segment, tokens = segments.segment_index, segments.segment_index.shape[0]
    first, last = segment[::BLOCK], torch.cat([segment[BLOCK - 1 : -1 : BLOCK], segment[-1:]])
    blocks = torch.arange(len(first), device=segment.device)
    row, column = blocks[:, None], blocks[None, :]
    some = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    single = first == last
    # In full blocks, every token attends to every token. An incomplete last block needs the mask function.
    full = some & single[:, None] & single[None, :]
    if tokens % BLOCK:
        full[-1] = False
        full[:, -1] = False
    if causal:
        some &= row >= column
        full &= row > column
    if window:
        distance = (row - column).abs()
        some &= (distance - 1) * BLOCK + 1 < window
        full &= (distance + 1) * BLOCK - 1 < window

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = segment[query] == segment[key]
        if causal:
            visible = visible & (query >= key)
        if window:
            visible = visible & ((query - key).abs() < window)
        return visible

    return BlockMask.from_kv_blocks(*_ordered(some & ~full), *_ordered(full), BLOCK, attends, (tokens, tokens))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks for each query block, and their indices followed by those of the other blocks."""
    count = blocks.sum(1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return count[None, None], indices[None, None]


@functools.cache
def softcapped(softcap: float) -> Callable[..., Tensor]:
    """Return the function that bounds FlexAttention's scores by tanh. It is cached, so that it is compiled once."""

    def score_mod(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled for any number of tokens."""
    # With static shapes, PyTorch would fall back to uncompiled FlexAttention after eight token counts, which keeps all
    # scores in memory.
    return torch.compile(flex_attention, dynamic=True)
