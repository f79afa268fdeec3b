"""Schedule when a run saves a checkpoint, and which checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Callable

from composer.core import Event, State
from composer.utils import create_interval_scheduler

from biphasic.config.durations import Duration
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import decay_start, spans
from biphasic.training.objective_schedule import elapsed


def branch_points(config: PretrainConfig) -> list[Duration]:
    """Return the points where other runs may branch off: each phase switch, the decay's start, `checkpoint.keep_at`.

    A run always saves at these points and keeps the checkpoints, regardless of `checkpoint.interval` and `checkpoint.keep`.
    """
    max_duration = config.max_duration
    switches = [span.start for span in spans(config.objective.phases, max_duration)[1:]]
    decay = decay_start(config.schedule, max_duration)
    decays = [decay] if decay != max_duration and decay.value else []
    return list(dict.fromkeys([*switches, *decays, *(point.of(max_duration) for point in config.checkpoint.keep_at)]))


def checkpoint_schedule(config: PretrainConfig) -> Callable[[State, Event], tuple[bool, bool]]:
    """Return a function of Composer's state and event: whether the interval is due, and whether to save and keep."""
    at_interval = create_interval_scheduler(str(config.checkpoint.interval))
    points = branch_points(config)

    def is_due(state: State, event: Event) -> tuple[bool, bool]:
        if state.previous_timestamp is None:
            return False, False
        before, now = elapsed(state.previous_timestamp), elapsed(state.timestamp)
        kept = any(
            now.reached(point) and not before.reached(point)
            for point in points
            if (point.unit == "ep") == (event == Event.EPOCH_CHECKPOINT)
        )
        return at_interval(state, event), kept

    return is_due
