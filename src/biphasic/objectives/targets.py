"""Build inputs and targets for causal (CLM) and masked language modeling (MLM).

Masks come from a counter-based RNG. The number for (seed, purpose, counter, row, position) is a hash of these five, computed
with 64-bit integers, which are exact on every device. A row therefore gets the same mask on any rank or machine, together
with any other rows, and after any number of resumes. The hash is splitmix64's finalizer (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from biphasic.model.losses import IGNORE

_SELECT, _REPLACE, _RANDOM_TOKEN = 1, 2, 3
"""Purposes of the random numbers."""
BITS = 32
"""Number of bits in each random integer."""
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Vocabulary:
    """The properties of the tokenizer's vocabulary that masking needs. Raises a ValueError if an id is not below `size`."""

    size: int
    """Largest id plus one, which is more than the number of tokens if ids have gaps. The embedding may have more rows."""
    mask_id: int
    special_ids: tuple[int, ...]
    """Tokens that are never masked and never used as random replacements."""

    def __post_init__(self) -> None:
        if outside := [number for number in (self.mask_id, *self.special_ids) if not 0 <= number < self.size]:
            raise ValueError(f"mask_id and special_ids: expected ids from 0 to size - 1 = {self.size - 1}; got {outside[0]}")

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a Hugging Face tokenizer. Raises a ValueError if it has no mask token."""
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask token: tokenizer.add_special_tokens({'mask_token': '<mask>'}), and then "
                "model.resize_token_embeddings(len(tokenizer))"
            )
        size = max(tokenizer.get_vocab().values()) + 1
        return cls(size, tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))


def clm_targets(tokens: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the next token of the segment as the target of each position; -100 at its last token and at padding.

    Tokens and targets are int64 [rows, length]; `segment_ids` [rows, length] are 1 for the tokens of a row's first segment,
    2 for the second, …; 0 for padding.
    """
    has_next = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    # Not by indexing with the mask, which would make the host wait for the device.
    next_tokens = torch.where(has_next, tokens[:, 1:], IGNORE)
    return torch.cat([next_tokens, torch.full_like(tokens[:, :1], IGNORE)], dim=1)


def mlm_inputs_and_targets(
    tokens: Tensor,
    segment_ids: Tensor,
    row_ids: Tensor,
    vocabulary: Vocabulary,
    *,
    seed: int,
    counter: int,
    masking_ratio: float,
    random_share: float = 0.0,
    keep_share: float = 0.0,
    target: Literal["same", "next"] = "same",
) -> tuple[Tensor, Tensor]:
    """Mask each token independently with probability `masking_ratio` (the paper, section 2.2).

    Args:
        tokens: int64 [rows, length].
        segment_ids: [rows, length]; 0 at padding.
        row_ids: int64 [rows]; with `seed` and `counter` as in `random_integers`.
        vocabulary: which tokens exist and which are special.
        masking_ratio: probability of selecting a token, above 0 and at most 1.
        random_share: share of the selected tokens that are replaced by a random token instead of the mask token.
        keep_share: share of the selected tokens that are left unchanged.
        target: `same` predicts a token at its own position. `next` predicts it at the position before it, as CLM does, so
            the first token of a segment is never selected.

    Returns:
        Inputs and targets, int64 [rows, length] each; targets are -100 where nothing is predicted.

    Raises:
        ValueError: a number is no such share, or the target is unknown.
    """
    mask_share = 1 - random_share - keep_share
    if not 0 < masking_ratio <= 1 or not min(random_share, keep_share, mask_share + 1e-9) >= 0:
        numbers = f"masking_ratio {masking_ratio}, random_share {random_share}, keep_share {keep_share}"
        raise ValueError(f"expected a ratio above 0 and at most 1, and shares of at most 1 together; got {numbers}")
    if target not in ("same", "next"):
        raise ValueError(f"target: expected same or next; got {target!r}")
    length = tokens.shape[1]
    special = torch.tensor(vocabulary.special_ids, device=tokens.device)
    selected = with_probability(random_integers(seed, _SELECT, counter, row_ids, length), masking_ratio)
    selected &= (segment_ids > 0) & ~torch.isin(tokens, special)
    if target == "next":
        selected[:, 0] = False
        selected[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
    inputs = tokens.masked_fill(selected, vocabulary.mask_id)
    if random_share or keep_share:
        integers = random_integers(seed, _REPLACE, counter, row_ids, length)
        keep = with_probability(integers, keep_share)
        inputs = torch.where(selected & keep, tokens, inputs)
        replace = selected & ~keep & with_probability(integers, keep_share + random_share)
        inputs = torch.where(replace, _random_tokens(row_ids, length, vocabulary, seed, counter), inputs)
    targets = torch.where(selected, tokens, IGNORE)
    if target == "next":
        targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORE)], dim=1)
    return inputs, targets


def _random_tokens(row_ids: Tensor, length: int, vocabulary: Vocabulary, seed: int, counter: int) -> Tensor:
    ordinary = torch.ones(vocabulary.size, dtype=torch.bool, device=row_ids.device)
    ordinary[list(vocabulary.special_ids)] = False
    ids = ordinary.nonzero()[:, 0]
    return ids[(random_integers(seed, _RANDOM_TOKEN, counter, row_ids, length) * len(ids)) >> BITS]


def _signed(number: int) -> int:
    """Return the number modulo 2**64, as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right logically; torch's `>>` is arithmetic and keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def random_integers(seed: int, purpose: int, counter: int, row_ids: Tensor, length: int) -> Tensor:
    """Generate uniformly distributed integers in [0, 2**BITS), int64 [rows, length], for rows with these ids, int64 [rows].

    Different purposes get independent numbers. The counter changes each time a row is seen again: it is the epoch, or in a
    mix the batch; 0 in validation.
    """
    key = torch.zeros((), dtype=torch.int64, device=row_ids.device)
    for part in (seed, purpose, counter):
        key = _mix(key + _signed((part + 1) * _GOLDEN))
    row_keys = _mix(key + (row_ids.long() + 1) * _signed(_GOLDEN))
    positions = torch.arange(1, length + 1, device=row_ids.device) * _signed(_GOLDEN)
    return _shift(_mix(row_keys[:, None] + positions), 64 - BITS)


def row_hashes(tokens: Tensor) -> Tensor:
    """Return a hash of each row's tokens, int64 [rows], which serves as the id of a row that has none."""
    positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * _signed(_GOLDEN)
    return _mix(_mix(tokens + 1) + positions).sum(1)


def with_probability(integers: Tensor, probability: float) -> Tensor:
    """Convert the result of `random_integers` to a bool tensor that is true with the given probability."""
    return integers < round(probability * (1 << BITS))
