"""Build targets for causal language modeling (CLM), where each token predicts the next one of its segment."""

from __future__ import annotations

import torch
from torch import Tensor

from biphasic.model.losses import IGNORE


def clm_targets(tokens: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the next token of the segment as the target of each position.

    Args:
        tokens: int64 [rows, length].
        segment_ids: [rows, length]: 1 for the tokens of a row's first segment, 2 for the second, …; 0 for padding.

    Returns:
        int64 [rows, length]: the next token; `IGNORE` at a segment's last token and at padding.
    """
    has_next = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    # Not by indexing with the mask, which would make the host wait for the device.
    next_tokens = torch.where(has_next, tokens[:, 1:], IGNORE)
    return torch.cat([next_tokens, torch.full_like(tokens[:, :1], IGNORE)], dim=1)
