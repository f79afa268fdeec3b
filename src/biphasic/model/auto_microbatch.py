"""Find the microbatch size that fits the GPU by a few measurements, and store it for the next start."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from biphasic.errors import UserError
from biphasic.storage import atomic_path

MICROBATCH_FILE = "microbatch.json"
MEMORY_SHARE = 0.94
"""Share of a GPU's memory that may be used; the rest is left for fragmentation."""


def find_microbatch(
    train: Callable[[int], object], rows: int, reserved: float, sharded: bool, file: Path, circumstances: dict[str, Any]
) -> int:
    """Return the microbatch size in rows, the same on all ranks, that fits every GPU and splits a rank's batch evenly.

    Args:
        train: runs forward and backward passes over the given number of rows, and clears the gradients.
        rows: number of rows in a rank's batch.
        reserved: bytes that training allocates later, such as the optimizer state.
        sharded: whether ranks wait for each other in `train`.
        file: file that stores the result.
        circumstances: settings that affect the result. A stored result is used only if they are equal.

    Raises:
        UserError: not even one row fits, or a sharded rank ran out of memory.
    """
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    stored = int(_reduce(_stored_result(file, circumstances) if first_rank else 0, "MAX"))
    if stored:
        return even_microbatch(rows, stored)

    def measure(count: int) -> float | None:
        peak = peak_bytes(lambda: train(count))
        if peak is None and sharded:
            # The other ranks are waiting in a collective for this rank.
            raise UserError(f"microbatch_size: auto: {count} rows didn't fit; set a number")
        highest = _reduce(math.inf if peak is None else peak, "MAX")
        return None if highest == math.inf else highest

    if first_rank:
        print(f"microbatch_size: auto: measuring how many of {rows} rows fit the GPU (a minute or two, once)")
    fitting = largest_microbatch(measure, rows, _reduce(available_bytes() - reserved, "MIN"))
    if first_rank:
        size = even_microbatch(rows, fitting)
        print(f"microbatch_size: auto: {fitting} rows fit, batches are cut into microbatches of {size}")
        with atomic_path(file) as partial:
            content = json.dumps({"circumstances": circumstances, "rows": fitting}, indent=1)
            partial.write_text(content + "\n", encoding="utf-8")
    return even_microbatch(rows, fitting)


def largest_microbatch(measure: Callable[[int], float | None], limit: int, available: float) -> int:
    """Return the largest number of rows, up to `limit`, whose peak memory stays within `available` bytes.

    Memory grows almost linearly with rows, so the line through two measurements predicts the next number to measure. The
    search ends when that number is less than 5% larger than one that fits.

    Args:
        measure: returns the peak bytes of training on the given number of rows; None if they didn't fit.
        limit: maximum number of rows.
        available: available bytes.

    Raises:
        UserError: not even one row fits.
    """
    peak = measure(1)
    if peak is None or peak > available:
        raise UserError("microbatch_size: not one row fits this GPU's memory: set parallelism.strategy: fsdp, or "
                        "compute.activation_checkpointing: all")  # fmt: skip
    fitting, upper, rows = 1, limit, min(4, limit)
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
    """Return the size that splits `rows` into the fewest microbatches of at most `fitting` rows, as evenly as possible."""
    return math.ceil(rows / math.ceil(rows / fitting))


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode within the context, and restore its modules' modes and the RNG states after it.

    A backbone that transformers has loaded is in evaluation mode, in which no layer is recomputed.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Dropout draws random numbers, and later ones must not depend on whether a stored result was used.
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        model.train()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def peak_bytes(work: Callable[[], object]) -> float | None:
    """Return the peak bytes allocated on the current GPU while `work` runs; None if it runs out of memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        work()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


def available_bytes() -> float:
    """Return the bytes of the current GPU's memory that this process may use."""
    free, total = torch.cuda.mem_get_info()
    return MEMORY_SHARE * total - (total - free - torch.cuda.memory_reserved())


def _stored_result(file: Path, circumstances: dict[str, Any]) -> int:
    """Return the stored number of rows that fit; 0 if none is stored for these circumstances."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return int(record["rows"]) if record["circumstances"] == circumstances else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _reduce(number: float, operation: str) -> float:
    """Return the maximum (`MAX`) or minimum (`MIN`) of all ranks' numbers."""
    if not torch.distributed.is_initialized():
        return number
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    value = torch.tensor(number, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(value, getattr(torch.distributed.ReduceOp, operation))
    return float(value)
