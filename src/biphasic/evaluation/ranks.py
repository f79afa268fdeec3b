"""Collectives for the ranks of an evaluation. A single process doesn't communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from composer.utils import dist
from torch import Tensor

Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 and return its result on all ranks."""
    values: list[Any] = [make() if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return values[0]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks, on the CPU."""
    if dist.get_world_size() == 1:
        return tensor.cpu()
    summed = tensor.to(_communication_device())
    dist.all_reduce(summed, reduce_operation="SUM")
    return summed.cpu()


def gather_from_ranks(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, on this rank's device."""
    return [part.to(tensor.device) for part in dist.all_gather(tensor.to(_communication_device()))]


def _communication_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
