"""What all ranks say to each other beside the training, on host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from composer.utils import dist

from biphasic.config.errors import UserError


class Together:
    """A gloo group of all ranks, for what must not mix with the training's own collectives nor wait for the device.

    Args:
        patience: how long a rank waits for the others, e.g. while one brings a checkpoint from a bucket. The training's
            own limit is shorter, since there a rank that doesn't come is gone.
    """

    def __init__(self, patience: timedelta = timedelta(minutes=30)):
        ranks = dist.get_world_size()
        self.group: Any = torch.distributed.new_group(backend="gloo", timeout=patience) if ranks > 1 else None
        """None for a single process."""

    def most(self, value: int) -> int:
        """The largest of all ranks' values."""
        if self.group is None:
            return value
        found = torch.tensor([value], dtype=torch.int32)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(found.item())

    def all_of(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def first(self, value: Any) -> Any:
        """The first rank's value."""
        return self.all_of(value if dist.get_global_rank() == 0 else None)[0]

    def raise_first(self, fault: str | None) -> None:
        """Stop all ranks when any one has a fault; None: this one has none.

        Raises:
            UserError: on every rank the same, the fault of the first rank that has one.
        """
        faults = [one for one in self.all_of(fault) if one]
        if faults:
            raise UserError(faults[0])

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.most(0)
