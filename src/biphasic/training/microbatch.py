"""How many rows fit a GPU at a time: measured before training, and remembered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core.precision import get_precision_context
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from biphasic.config.errors import UserError
from biphasic.config.schema import PretrainConfig
from biphasic.data.streaming import Batch

FILE = "microbatch.json"
_ROOM = 0.94
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


def find(trainer: Trainer, config: PretrainConfig, folder: Path) -> int:
    """A rank's microbatch on its GPU, the same on all ranks. The model's gradients are gone afterwards, nothing else.

    Args:
        trainer: before its first batch.
        config: of the run.
        folder: of the run; holds what was found by an earlier start on like machines.
    """
    most = config.global_batch_size // dist.get_world_size()
    key = _circumstances(config)
    known = _remembered(folder / FILE, key) if dist.get_global_rank() == 0 else None
    known = dist.all_gather_object(known)[0]
    if known is not None:
        return even(most, known)
    if dist.get_global_rank() == 0:
        print(f"microbatch_size: auto: measuring how many of {most} rows fit the GPU (a minute or two, once)")
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info()
    taken_by_others = total - free - torch.cuda.memory_reserved(device)
    room = _agreed(_ROOM * total - taken_by_others - _missing_moments(trainer), "MIN")
    fit = largest(lambda rows: _measure(trainer, config, rows), most, room)
    if dist.get_global_rank() == 0:
        print(f"microbatch_size: auto: {fit} rows fit, batches are cut into microbatches of {even(most, fit)}")
        temporary = folder / f"{FILE}.tmp"
        temporary.write_text(json.dumps({"circumstances": key, "rows": fit}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / FILE)
    return even(most, fit)


def _circumstances(config: PretrainConfig) -> dict[str, Any]:
    """What decides how much memory a row takes, and how much there is."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "memory": properties.total_memory,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "model": config.model.model_dump(mode="json"),
        "length": config.data.sequence_length,
        "precision": config.precision,
        "parallelism": config.parallelism.model_dump(mode="json"),
        "compute": config.compute.model_dump(mode="json"),
        "most": config.global_batch_size // dist.get_world_size(),
    }


def _remembered(file: Path, key: dict[str, Any]) -> int | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return int(found["rows"]) if found["circumstances"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _missing_moments(trainer: Trainer) -> float:
    """Bytes of the optimizer's state that its first step will take."""
    missing = 0
    for optimizer in trainer.state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state.get(parameter):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    missing += 2 * local.numel() * local.element_size()
    return missing


def _measure(trainer: Trainer, config: PretrainConfig, rows: int) -> float | None:
    """Bytes at the peak of a forward and backward pass over `rows` rows, on the rank that takes most."""
    state, length = trainer.state, config.data.sequence_length
    model, ranks = state.model, dist.get_world_size()
    sharded = state.fsdp_config is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    peak, error = float("inf"), None
    # Ranks of DDP don't need one another for this; in FSDP, one that has no room leaves the others waiting.
    alone = model.no_sync if isinstance(model, DistributedDataParallel) else torch.enable_grad
    try:
        with alone():
            for _ in range(2):  # the second with gradients to add to
                with get_precision_context(state.precision, state.precision_config):
                    total, _ = model(_rows(rows, length, config))
                total.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    except torch.cuda.OutOfMemoryError as found:
        error = found
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if error is not None and sharded and ranks > 1:
        raise UserError(f"microbatch_size: auto: {rows} rows didn't fit; set a number") from error
    error = None  # its traceback holds the tensors
    worst = _agreed(peak, "MAX")
    return None if worst == float("inf") else worst


def _rows(rows: int, length: int, config: PretrainConfig) -> Batch:
    """The batch that takes most: causal, where there is such a phase, with something predicted everywhere."""
    device = torch.cuda.current_device()
    tokens = torch.zeros((rows, length), dtype=torch.int64, device=device)
    causal = any(phase.name == "clm" for phase in config.objective.phases)
    return {
        "tokens": tokens,
        "inputs": tokens,
        "targets": tokens,
        "lengths": [[length]] * rows,
        "objective": "clm" if causal else "mlm",
    }


def _agreed(number: float, how: str) -> float:
    found = torch.tensor(number, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(found, reduce_operation=how)
    return float(found)
