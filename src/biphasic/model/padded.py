"""Encoders of other families, called with padding: BERT, ModernBERT and whatever `AutoModel` loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from biphasic.model.segments import Segments

_WASTE = 0.1
"""Largest share of padding in a group, once it has `_FEW` texts: a pass over few costs as much as one over some more."""
_FEW = 4


def encode_in_groups(model: nn.Module, tokens: Tensor, segments: Segments, pad_id: int) -> Tensor:
    """Hidden states of a flat run of tokens, from a model that takes padded batches. Texts of like length share a batch.

    Args:
        model: a Hugging Face encoder.
        tokens: int64 [tokens].
        segments: one for each text.
        pad_id: of padding; some families (RoBERTa) count positions by it.

    Returns:
        [tokens, width].
    """
    starts = [0]
    for length in segments.lengths:
        starts.append(starts[-1] + length)
    found: list[Tensor] = []
    order: list[int] = []
    for group in groups_of(segments.lengths):
        longest = max(segments.lengths[index] for index in group)
        index = torch.zeros((len(group), longest), dtype=torch.int64)
        mask = torch.zeros((len(group), longest), dtype=torch.int64)
        for row, segment in enumerate(group):
            start, length = starts[segment], segments.lengths[segment]
            index[row, :length] = torch.arange(start, start + length)
            mask[row, :length] = 1
            order += range(start, start + length)
        # Where a token of the batch lies, from the host: asking the mask on the device would wait for it.
        kept = mask.flatten().nonzero()[:, 0]
        index, mask, kept = (x.to(tokens.device, non_blocking=True) for x in (index, mask, kept))
        inputs = torch.where(mask.bool(), tokens[index], pad_id)
        output: Any = model(input_ids=inputs, attention_mask=mask)
        found.append(output.last_hidden_state.flatten(0, 1)[kept])
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(found)[back.to(tokens.device, non_blocking=True)]


def groups_of(lengths: Sequence[int]) -> list[list[int]]:
    """Texts by index, in groups that pad little, from the longest down."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    held = 0
    for index in order:
        group = groups[-1] if groups else []
        room = (len(group) + 1) * lengths[group[0]] if group else 0
        if group and (len(group) < _FEW or held + lengths[index] >= (1 - _WASTE) * room):
            group.append(index)
            held += lengths[index]
        else:
            groups.append([index])
            held = lengths[index]
    return groups


def looks_both_ways(model: nn.Module, vocabulary: int) -> bool:
    """Whether a text's first hidden state depends on its last token.

    Args:
        model: a Hugging Face encoder, in evaluation mode.
        vocabulary: how many ids it has.
    """
    device = next(model.parameters()).device
    text = torch.arange(1, 9, device=device) * max(vocabulary // 16, 1) % vocabulary
    other = text.clone()
    other[-1] = (other[-1] + 1) % vocabulary
    with torch.inference_mode():
        output: Any = model(input_ids=torch.stack([text, other]), attention_mask=torch.ones(2, 8, device=device).long())
    first = output.last_hidden_state[:, 0].float()
    return bool((first[0] - first[1]).abs().max() > 1e-6 * first.abs().max())
