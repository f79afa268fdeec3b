"""Random numbers that depend on what they are drawn for, and on nothing else.

A counter-based generator: the number for (seed, purpose, epoch, row, position) is a hash of these five, computed with
64-bit integers, which are exact on every device. So a row is masked alike whatever the batch it is in, the rank, the
machine, or how often the run was resumed. The hash is splitmix64's finaliser (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32
"""Draws are integers of this many bits."""
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 1 << 64


def _signed(number: int) -> int:
    number %= _WORD
    return number - _WORD if number >= _WORD // 2 else number


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_FACTORS[0])
    x = (x ^ _shift(x, 27)) * _signed(_FACTORS[1])
    return x ^ _shift(x, 31)


def draw(seed: int, purpose: int, epoch: int, rows: Tensor, length: int) -> Tensor:
    """Uniform integers for each position of each row.

    Args:
        seed: the run's seed.
        purpose: keeps draws for different ends apart.
        epoch: how often the data has been gone through before.
        rows: int64 [rows], each row's id in the dataset.
        length: positions in a row.

    Returns:
        int64 [rows, length] in [0, 2**BITS).
    """
    key = torch.zeros((), dtype=torch.int64, device=rows.device)
    for part in (seed, purpose, epoch):
        key = _mix(key + _signed((part + 1) * _GOLDEN))
    by_row = _mix(key + (rows.long() + 1) * _signed(_GOLDEN))
    positions = torch.arange(1, length + 1, device=rows.device) * _signed(_GOLDEN)
    return _shift(_mix(by_row[:, None] + positions), 64 - BITS)


def below(draws: Tensor, share: float) -> Tensor:
    """Which of the draws fall into the first `share` of their range: true with that probability."""
    return draws < round(share * (1 << BITS))
