"""How many rows fit a GPU at a time, found by few measurements."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from biphasic.config.errors import UserError

ROOM = 0.94
"""Of a GPU's memory, the share that is planned with; the rest is for fragments."""


def largest(measure: Callable[[int], float | None], most: int, room: float) -> int:
    """The largest number of rows whose peak stays within `room`, up to `most`.

    Memory grows linearly with rows, nearly: two measurements give a line, and the line the next number to measure, until
    that is no more than a twentieth away.

    Args:
        measure: bytes at the peak of training on so many rows; None where they didn't fit.
        most: rows.
        room: bytes.

    Raises:
        UserError: not even one row fits.
    """
    peak = measure(1)
    if peak is None or peak > room:
        raise UserError("microbatch_size: not one row fits this GPU's memory: set parallelism.strategy: fsdp, or "
                        "compute.activation_checkpointing: all")  # fmt: skip
    fits, limit, rows = 1, most, min(4, most)
    while rows > fits:
        found = measure(rows)
        slope = None if found is None else (found - peak) / (rows - fits)
        if found is None or found > room:
            limit = rows - 1
            rows = (fits + rows) // 2 if not slope else min(fits + int((room - peak) / slope), limit)
            continue
        fits, peak = rows, found
        rows = limit if not slope or slope < 0 else min(fits + int((room - peak) / slope), limit)
        if rows < most and rows < fits * 1.05:
            break
    return fits


def even(most: int, fit: int) -> int:
    """Rows of a microbatch, of at most `fit`, that cut `most` into as few and as even ones as can be."""
    return math.ceil(most / math.ceil(most / fit))


def peak_bytes(work: Callable[[], object]) -> float | None:
    """Bytes that were allocated on the current GPU at most while `work` ran; None where they didn't suffice."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        work()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


def room_bytes() -> float:
    """Bytes of the current GPU that this process may plan with."""
    free, total = torch.cuda.mem_get_info()
    return ROOM * total - (total - free - torch.cuda.memory_reserved())
