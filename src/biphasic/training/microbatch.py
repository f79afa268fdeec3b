"""How many rows fit a GPU at a time: measured before training, and remembered."""

from __future__ import annotations

import json
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
from biphasic.model.fitting import even, largest, peak_bytes, room_bytes

FILE = "microbatch.json"


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
    room = _agreed(room_bytes() - _missing_moments(trainer), "MIN")
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
    model = state.model
    # Ranks of DDP don't need one another for this; in FSDP, one that has no room leaves the others waiting.
    alone = model.no_sync if isinstance(model, DistributedDataParallel) else torch.enable_grad

    def work() -> None:
        with alone():
            for _ in range(2):  # the second with gradients to add to
                with get_precision_context(state.precision, state.precision_config):
                    total, _ = model(_rows(rows, length, config))
                total.backward()

    peak = peak_bytes(work)
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if peak is None and state.fsdp_config is not None and dist.get_world_size() > 1:
        raise UserError(f"microbatch_size: auto: {rows} rows didn't fit; set a number")
    worst = _agreed(float("inf") if peak is None else peak, "MAX")
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
