"""Causal language modeling: each token predicts the next one of its segment."""

from __future__ import annotations

import torch
from torch import Tensor

from biphasic.model.losses import IGNORE


def clm_targets(tokens: Tensor, segment_ids: Tensor) -> Tensor:
    """What each position predicts.

    Args:
        tokens: int64 [rows, length].
        segment_ids: [rows, length]: 1 for the tokens of a row's first segment, 2 for the second, …; 0 for padding.

    Returns:
        int64 [rows, length]: the next token; `IGNORE` at a segment's last token and at padding.
    """
    targets = torch.full_like(tokens, IGNORE)
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    targets[:, :-1][follows] = tokens[:, 1:][follows]
    return targets
