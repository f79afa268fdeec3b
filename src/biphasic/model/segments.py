"""How a flat run of tokens is cut into what attends to itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor


@dataclass(eq=False)
class Segments:
    """Segments of a flat run of tokens, one after another.

    `lengths` lie on the host, the tensors on the tokens' device, so that no kernel needs a synchronisation. A layer that
    is compiled reads only what has the same type, shape or value in every batch: `cu_seqlens`, whose size is marked as
    varying, `longest`, `attention` and `block_masks`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """int32 [segments + 1]: where each segment begins, and the end of the last."""
    owner: Tensor
    """int32 [tokens]: each token's segment, counted from 0."""
    position_ids: Tensor
    """int64 [tokens]: each token's position within its segment."""
    longest: int
    """No segment has more tokens; kernels make room for so many."""
    attention: str = "auto"
    """The backend, see `biphasic.model.attention.BACKENDS`."""
    block_masks: dict[int, Any] = field(default_factory=dict)
    """FlexAttention's masks, by sliding window (0: none); see `biphasic.model.flex`."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, longest: int | None = None, attention: str = "auto"
    ) -> Segments:
        """Segments of the given lengths (each at least 1), one after another.

        Args:
            lengths: tokens of each.
            device: of the tokens.
            longest: an upper bound of the lengths that stays the same from batch to batch; default: their maximum.
            attention: the backend.
        """
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        ends[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        tokens = int(ends[-1])
        if device.type == "cuda":
            # From pageable memory, the copy would wait for what the device is doing.
            ends = ends.pin_memory()
        cu_seqlens = ends.to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        at = torch.arange(tokens, device=device, dtype=torch.int32)
        owner = torch.bucketize(at, cu_seqlens[1:], out_int32=True, right=True)
        position_ids = (at - cu_seqlens[owner]).long()
        return cls(tuple(lengths), cu_seqlens, owner, position_ids, longest or max(lengths), attention)

    @property
    def uniform(self) -> bool:
        """Whether all segments are equally long."""
        return min(self.lengths) == max(self.lengths)


def visible(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Which tokens of a segment see which: bool [length, length], queries first.

    Args:
        length: tokens.
        causal: whether a token sees only itself and what is before it.
        window: tokens this far apart, or further, don't see each other; 0: no limit.
        device: of the mask.
    """
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return mask & (distance.abs() < window) if window else mask
