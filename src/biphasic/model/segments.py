"""Define segments: the parts of a packed sequence within which tokens attend to each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.model.architecture import RopeThreshold


def padding_groups(lengths: Sequence[int], exponent: int, extra: int) -> list[list[int]]:
    """Group the indices of texts into batches with little padding, from the longest text to the shortest.

    A text's cost is its length to the power `exponent`. Padding is at most a tenth of a batch's cost, besides the cost
    `extra`, which is negligible in a call.
    """
    groups: list[list[int]] = []
    cost = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        group, own = groups[-1] if groups else [], lengths[index] ** exponent
        padded = (len(group) + 1) * lengths[group[0]] ** exponent if group else 0
        if group and (1 - 0.1) * (padded - extra) <= cost + own:
            group.append(index)
            cost += own
        else:
            groups.append([index])
            cost = own
    return groups


@dataclass(frozen=True)
class DenseGroups:
    """Groups of segments, each padded to its longest segment for dense attention."""

    shapes: tuple[tuple[int, int], ...]
    """For each group, its number of segments and the length of the longest."""
    tokens: Tensor
    """int64 [padded tokens]: index of each token, group by group; at padding, that of the segment's first token."""
    masks: tuple[Tensor | None, ...]
    """For each group, bool [segments, 1, 1, longest]: true at tokens; None for a group without padding."""
    outputs: Tensor
    """int64 [tokens]: index of each token among the padded ones."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> DenseGroups:
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        shapes, tokens, masks, outputs, total = [], [], [], torch.empty(int(size.sum()), dtype=torch.int64), 0
        for group in padding_groups(lengths, exponent=2, extra=64**2):
            position = torch.arange(lengths[group[0]])
            mask = position < size[group][:, None]
            index = start[group][:, None] + position * mask
            outputs[index[mask]] = total + torch.arange(mask.numel()).view(mask.shape)[mask]
            total += mask.numel()
            shapes.append((len(group), lengths[group[0]]))
            tokens.append(index.flatten())
            masks.append(None if mask.all() else mask[:, None, None].to(device, non_blocking=True))
        indices = torch.cat(tokens).to(device, non_blocking=True)
        return cls(tuple(shapes), indices, tuple(masks), outputs.to(device, non_blocking=True))


@dataclass(eq=False)
class Segments:
    """Consecutive segments of a packed sequence of tokens.

    `lengths` are on the host and tensors on the tokens' device, so no kernel needs a synchronization. To avoid
    recompilation, compiled layers read only `cu_seqlens` (its size is marked as dynamic), `max_seqlen` and
    `block_masks`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """int32 [segments + 1]: start of each segment, and end of the last one. Empty segments may follow."""
    segment_index: Tensor
    """int32 [tokens]: index of each token's segment, counted from 0."""
    position_ids: Tensor
    """int64 [tokens]: position of each token within its segment."""
    max_seqlen: int
    """Upper bound of the segment lengths."""
    block_masks: dict[int, Any] = field(default_factory=dict)
    """FlexAttention's block masks by sliding window (0: none)."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, max_seqlen: int | None = None, count: int | None = None
    ) -> Segments:
        """Build segments of the given lengths, each at least 1; `cu_seqlens` has `count` of them, the last ones empty."""
        ends = torch.zeros((count or len(lengths)) + 1, dtype=torch.int32)
        ends[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        tokens = sum(lengths)
        ends[len(lengths) + 1 :] = tokens
        if device.type == "cuda":
            # Pinned, because a copy from pageable memory would make the host wait.
            ends = ends.pin_memory()
        cu_seqlens = ends.to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        token = torch.arange(tokens, device=device, dtype=torch.int32)
        segment_index = torch.bucketize(token, cu_seqlens[1:], out_int32=True, right=True)
        position_ids = (token - cu_seqlens[segment_index]).long()
        return cls(tuple(lengths), cu_seqlens, segment_index, position_ids, max_seqlen or max(lengths))

    @functools.cached_property
    def dense_groups(self) -> DenseGroups:
        return DenseGroups.of(self.lengths, self.cu_seqlens.device)


def run_lengths(segment_ids: Tensor) -> list[list[int]]:
    """Return the lengths of each row's segments in order, from their ids, [rows, length]; padding is a segment."""
    ends = torch.ones_like(segment_ids, dtype=torch.bool)
    ends[:, :-1] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return [torch.diff(row.nonzero()[:, 0] + 1, prepend=torch.tensor([0])).tolist() for row in ends.cpu()]


def limited_lengths(segment_ids: Tensor, rope: RopeThreshold) -> list[list[int]]:
    """Return what `run_lengths` returns, with padding in segments of at most the threshold's length.

    Raises a UserError if another segment is longer, because its positions would depend on the other segments of a call.
    """
    pieces = -1 - torch.arange(segment_ids.shape[1], device=segment_ids.device) // rope.length
    lengths = run_lengths(torch.where(segment_ids == 0, pieces, segment_ids))
    if (longest := max(map(max, lengths), default=0)) > rope.length:
        problem = f"positions ({rope.kind}) depend on the other segments beyond its {rope.key} of {rope.length} tokens"
        raise UserError(f"a segment has {longest} tokens, but the model's {problem}: make segments shorter")
    return lengths


def rounded_count(segments: int) -> int:
    """Round up to a multiple of 8 with three significant bits, because cuDNN prepares a plan for each number."""
    step = max(1 << max(segments.bit_length() - 3, 0), 8)
    return -(-segments // step) * step


def visibility_mask(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """Return a bool mask [queries, keys]; with a `window` other than 0, tokens attend only to tokens closer than this."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return mask & (distance.abs() < window) if window else mask


def reserved_positions(encoder: nn.Module) -> int:
    """Return the position of a text's first token: 0, or in RoBERTa-like families the one after the padding token's."""
    embeddings = getattr(encoder, "embeddings", None)
    padding: int | None = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1
