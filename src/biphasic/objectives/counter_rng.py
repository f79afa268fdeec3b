"""Generate random numbers by a counter-based RNG, for masks that don't depend on batching, devices or resumes.

The number for (seed, purpose, counter, row, position) is a hash of these five, computed with 64-bit integers, which are
exact on every device. A row therefore gets the same mask on any rank or machine, together with any other rows, and
after any number of resumes. The hash is splitmix64's finalizer (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32
"""Number of bits in each random integer."""
_GOLDEN = 0x9E3779B97F4A7C15


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
    """Generate uniformly distributed integers in [0, 2**BITS), int64 [rows, length].

    Args:
        seed: the run's seed.
        purpose: id of the use; different purposes get independent numbers.
        counter: a number that changes each time a row is seen again: the epoch, or in a mix the batch. 0 in validation.
        row_ids: int64 [rows], ids in the dataset.
        length: number of positions in a row.
    """
    key = torch.zeros((), dtype=torch.int64, device=row_ids.device)
    for part in (seed, purpose, counter):
        key = _mix(key + _signed((part + 1) * _GOLDEN))
    row_keys = _mix(key + (row_ids.long() + 1) * _signed(_GOLDEN))
    positions = torch.arange(1, length + 1, device=row_ids.device) * _signed(_GOLDEN)
    return _shift(_mix(row_keys[:, None] + positions), 64 - BITS)


def with_probability(integers: Tensor, probability: float) -> Tensor:
    """Convert the result of `random_integers` to a bool tensor that is true with the given probability."""
    return integers < round(probability * (1 << BITS))
