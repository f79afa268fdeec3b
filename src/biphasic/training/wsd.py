"""Warmup-stable-decay: the learning rate of the batch that is trained."""

from __future__ import annotations

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from biphasic.config.durations import Duration
from biphasic.config.schema import ScheduleConfig
from biphasic.config.timeline import learning_rate_factor
from biphasic.training.objective_schedule import elapsed


class WarmupStableDecay(Algorithm):
    """The learning rate rises linearly from 0, stays, and falls at the end (see `ScheduleConfig`).

    Not a Composer scheduler: Composer asks these for the next batch's rate before it has counted the batch that is done,
    so that all rates come a batch late, the first one twice, and the last never. Here the timestamp decides when a batch
    begins, as it does for the phases; nothing is kept in checkpoints.

    Args:
        schedule: the YAML's `schedule:` section.
        max_duration: of the run, where the decay ends.
        lr: the highest rate.
    """

    def __init__(self, schedule: ScheduleConfig, max_duration: Duration, lr: float):
        self.schedule = schedule
        self.max_duration = max_duration
        self.lr = lr

    def match(self, event: Event, state: State) -> bool:
        """Before each batch."""
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Set the rate."""
        rate = self.lr * learning_rate_factor(self.schedule, self.max_duration, elapsed(state.timestamp))
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
