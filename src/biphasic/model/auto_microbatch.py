"""Find the number of rows that fit in GPU memory by a few measurements. Imports torch only, for benchmarks/gpu.py."""

import math
from collections.abc import Callable

import torch

from biphasic.devices import is_out_of_memory
from biphasic.errors import UserError


def largest_microbatch(
    measure: Callable[[int], float | None], limit: int, available: float, before: float | None = None
) -> int:
    """Return the largest number of rows, up to `limit`, whose peak memory stays within `available` bytes.

    `measure` returns the peak bytes of training on a number of rows; None if they didn't fit. Memory grows almost
    linearly with rows, so the line through two measurements predicts the next number to measure. The search ends when
    that number is less than 5% larger than one that fits. If a measurement must not run out of memory, `before` is the bytes
    that are allocated before the first one: a row takes at most what the first one added to them. Raises a UserError if not
    even one row fits.
    """
    peak = measure(1)
    if peak is None or peak > available:
        raise UserError("microbatch_size: not one row fits this GPU's memory: set parallelism.strategy: fsdp, or "
                        "compute.activation_checkpointing: all")  # fmt: skip
    sure = 4 if before is None else int((available - before) / max(peak - before, 1))
    fitting, upper, rows = 1, limit, min(4, sure, limit)
    while rows > fitting:
        next_peak = measure(rows)
        slope = None if next_peak is None else (next_peak - peak) / (rows - fitting)
        if next_peak is None or next_peak > available:
            upper = rows - 1
            rows = (fitting + rows) // 2 if not slope else min(fitting + int((available - peak) / slope), upper)
            continue
        fitting, peak = rows, next_peak
        rows = upper if not slope or slope < 0 else min(fitting + int((available - peak) / slope), upper)
        if rows < limit and rows < fitting * 1.05:
            break
    return fitting


def even_microbatch(rows: int, fitting: int) -> int:
    """Return the microbatch size that splits `rows` evenly into the fewest microbatches of at most `fitting` rows."""
    return math.ceil(rows / math.ceil(rows / fitting))


def peak_bytes(work: Callable[[], object]) -> float | None:
    """Return the peak bytes allocated on the current GPU while `work` runs; None if it runs out of memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        work()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return torch.cuda.max_memory_allocated()


def available_bytes() -> float:
    """Return the bytes of the current GPU's memory that this process may use: 6% are left for fragmentation."""
    free, total = torch.cuda.mem_get_info()
    return 0.94 * total - (total - free - torch.cuda.memory_reserved())
