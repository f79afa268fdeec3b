"""Build AdamW, and set the learning rate of each batch."""

from __future__ import annotations

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import nn

from biphasic.config.durations import Duration
from biphasic.config.pretrain import OptimizerConfig
from biphasic.config.timeline import ScheduleConfig, learning_rate_factor
from biphasic.training.objective_schedule import elapsed


def adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW with weight decay on every parameter."""
    return torch.optim.AdamW(
        [{"params": list(module.parameters())}],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=torch.cuda.is_available(),
    )


class WarmupStableDecay(Algorithm):
    """Algorithm that sets the learning rate: a linear warmup from 0, a stable phase, and a decay to `max_duration`.

    It is not a Composer scheduler, because Composer asks a scheduler for the next batch's rate before it counts the last
    batch. Every rate would come one batch late: the first would be used twice and the last never. Here the rate depends on
    the timestamp alone, so nothing is stored in checkpoints. `lr` is the highest rate.
    """

    def __init__(self, schedule: ScheduleConfig, max_duration: Duration, lr: float):
        self.schedule, self.max_duration, self.lr = schedule, max_duration, lr

    def match(self, event: Event, state: State) -> bool:
        """Run before each batch."""
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Set the learning rate of the batch."""
        rate = self.lr * learning_rate_factor(self.schedule, self.max_duration, elapsed(state.timestamp))
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
