"""Define segments, the parts of a packed sequence within which tokens attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor


@dataclass(eq=False)
class Segments:
    """Consecutive segments of a packed sequence of tokens.

    `lengths` are on the host and the tensors on the tokens' device, so no kernel needs a synchronization. To avoid
    recompilation, compiled layers read only `cu_seqlens`, whose size is marked as dynamic, `max_seqlen`, `attention` and
    `block_masks`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """int32 [segments + 1]: start of each segment, and end of the last one."""
    segment_index: Tensor
    """int32 [tokens]: index of each token's segment, counted from 0."""
    position_ids: Tensor
    """int64 [tokens]: position of each token within its segment."""
    max_seqlen: int
    """Upper bound of the segment lengths."""
    attention: str = "auto"
    """Attention backend; see `biphasic.model.attention.BACKENDS`."""
    block_masks: dict[int, Any] = field(default_factory=dict)
    """FlexAttention's block masks by sliding window (0: none); see `biphasic.model.flex`."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, max_seqlen: int | None = None, attention: str = "auto"
    ) -> Segments:
        """Build segments of the given lengths.

        Args:
            lengths: number of tokens in each segment, at least 1.
            device: device of the tokens.
            max_seqlen: upper bound of the lengths that is the same for all batches. Default: the maximum length.
            attention: attention backend.
        """
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        ends[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        tokens = int(ends[-1])
        if device.type == "cuda":
            # Pinned, because a copy from pageable memory would wait for the device.
            ends = ends.pin_memory()
        cu_seqlens = ends.to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        token = torch.arange(tokens, device=device, dtype=torch.int32)
        segment_index = torch.bucketize(token, cu_seqlens[1:], out_int32=True, right=True)
        position_ids = (token - cu_seqlens[segment_index]).long()
        return cls(tuple(lengths), cu_seqlens, segment_index, position_ids, max_seqlen or max(lengths), attention)

    @property
    def uniform(self) -> bool:
        """Whether all segments have the same length."""
        return min(self.lengths) == max(self.lengths)


def visibility_mask(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Return which tokens of a segment attend to which, as a bool mask [queries, keys].

    Args:
        length: number of tokens in the segment.
        causal: whether a token attends only to itself and to tokens before it.
        window: a token attends only to tokens closer than this; 0: no limit.
        device: device of the mask.
    """
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return mask & (distance.abs() < window) if window else mask
