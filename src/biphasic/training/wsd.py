"""Warmup-stable-decay, as a Composer scheduler."""

from __future__ import annotations

from composer.core import State
from composer.optim import ComposerScheduler

from biphasic.config.durations import Duration
from biphasic.config.schema import ScheduleConfig
from biphasic.config.timeline import learning_rate_factor
from biphasic.training.objective_schedule import elapsed


class WarmupStableDecay(ComposerScheduler):
    """The learning rate rises linearly from 0, stays, and falls at the end (see `ScheduleConfig`).

    Args:
        schedule: the YAML's `schedule:` section.
        max_duration: of the run, where the decay ends.
    """

    def __init__(self, schedule: ScheduleConfig, max_duration: Duration):
        self.schedule = schedule
        self.max_duration = max_duration

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The factor for the batch that the timestamp stands at."""
        if ssr != 1.0:
            raise ValueError("scale_schedule_ratio is not supported: change max_duration instead")
        return learning_rate_factor(self.schedule, self.max_duration, elapsed(state.timestamp))
