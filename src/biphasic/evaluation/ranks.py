"""What ranks that evaluate together say to each other. With one process nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from composer.utils import dist
from torch import Tensor

Made = TypeVar("Made")


def from_first(make: Callable[[], Made]) -> Made:
    """What the first rank makes, on all ranks."""
    held: list[Any] = [make() if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


def same_on_all(value: str) -> bool:
    """Whether all ranks have the same."""
    return len(set(dist.all_gather_object(value))) == 1


def total(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on the CPU."""
    if dist.get_world_size() == 1:
        return tensor.cpu()
    held = tensor.to(_on_wire())
    dist.all_reduce(held, reduce_operation="SUM")
    return held.cpu()


def gathered(tensor: Tensor) -> list[Tensor]:
    """Every rank's, on this one's device."""
    return [part.to(tensor.device) for part in dist.all_gather(tensor.to(_on_wire()))]


def _on_wire() -> torch.device:
    """Where the process group wants its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
