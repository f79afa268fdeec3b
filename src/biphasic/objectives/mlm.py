"""Masked language modeling: tokens are hidden at random and predicted from both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from biphasic.model.losses import IGNORE
from biphasic.objectives.draws import BITS, below, draw

_SELECT, _REPLACE, _RANDOM_TOKEN = 1, 2, 3


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know of the tokenizer."""

    size: int
    """Tokens that exist; the embedding may have more rows."""
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked, never drawn as replacement."""


def mlm_inputs_and_targets(
    tokens: Tensor,
    segment_ids: Tensor,
    rows: Tensor,
    vocabulary: Vocabulary,
    *,
    seed: int,
    epoch: int,
    masking_ratio: float,
    random_share: float = 0.0,
    keep_share: float = 0.0,
    target: Literal["same", "next"] = "same",
) -> tuple[Tensor, Tensor]:
    """Mask each token independently with probability `masking_ratio` (the paper, section 2.2).

    Args:
        tokens: int64 [rows, length].
        segment_ids: [rows, length]; 0 at padding.
        rows: int64 [rows], ids in the dataset: together with the seed, the epoch and the position they decide the masks.
        vocabulary: which tokens exist and which are special.
        seed: the run's seed.
        epoch: how often the data has been gone through before.
        masking_ratio: in (0, 1).
        random_share: of the selected tokens, how many become a random token instead of the mask.
        keep_share: of the selected tokens, how many stay as they are.
        target: `same` predicts a token at its own position; `next` at the position before it, where CLM predicts it.
            The first token of a segment has no such position and is then never selected.

    Returns:
        Inputs and targets, int64 [rows, length] each; targets are `IGNORE` where nothing is predicted.
    """
    length = tokens.shape[1]
    special = torch.tensor(vocabulary.special_ids, device=tokens.device)
    selected = below(draw(seed, _SELECT, epoch, rows, length), masking_ratio)
    selected &= (segment_ids > 0) & ~torch.isin(tokens, special)
    if target == "next":
        selected[:, 0] = False
        selected[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
    inputs = tokens.masked_fill(selected, vocabulary.mask_id)
    if random_share or keep_share:
        fate = draw(seed, _REPLACE, epoch, rows, length)
        inputs = torch.where(selected & below(fate, keep_share), tokens, inputs)
        randomised = selected & ~below(fate, keep_share) & below(fate, keep_share + random_share)
        inputs = torch.where(randomised, _random_tokens(rows, length, vocabulary, seed, epoch), inputs)
    targets = torch.where(selected, tokens, IGNORE)
    if target == "next":
        targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORE)], dim=1)
    return inputs, targets


def _random_tokens(rows: Tensor, length: int, vocabulary: Vocabulary, seed: int, epoch: int) -> Tensor:
    ordinary = torch.ones(vocabulary.size, dtype=torch.bool, device=rows.device)
    ordinary[list(vocabulary.special_ids)] = False
    ids = ordinary.nonzero()[:, 0]
    return ids[(draw(seed, _RANDOM_TOKEN, epoch, rows, length) * len(ids)) >> BITS]
