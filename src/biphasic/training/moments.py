"""When a run saves, and which of its checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable

from composer.core import Event, State
from composer.utils import create_interval_scheduler

from biphasic.config.durations import Duration
from biphasic.config.schema import PretrainConfig
from biphasic.config.timeline import decay_start, spans
from biphasic.training.objective_schedule import elapsed


def kept_moments(config: PretrainConfig) -> list[Duration]:
    """Where a run saves whatever the interval, and what it saved stays whatever `checkpoint.keep` says.

    These are what another run may branch off: each switch, the start of the decay, and `checkpoint.keep_at`.
    """
    whole = config.max_duration
    switches = [span.start for span in spans(config.objective.phases, whole)[1:]]
    decay = decay_start(config.schedule, whole)
    named = [moment.of(whole) for moment in config.checkpoint.keep_at]
    return list(dict.fromkeys([*switches, *([decay] if decay != whole and decay.value else []), *named]))


def saves(config: PretrainConfig) -> Callable[[State, Event], tuple[bool, bool]]:
    """Whether to save at an event, and whether to keep that checkpoint: at intervals, at the end, at kept moments."""
    at_interval = create_interval_scheduler(str(config.checkpoint.interval))
    moments = kept_moments(config)

    def due(state: State, event: Event) -> tuple[bool, bool]:
        if state.previous_timestamp is None:
            return False, False
        before, now = elapsed(state.previous_timestamp), elapsed(state.timestamp)
        here = [one for one in moments if (one.unit == "ep") == (event == Event.EPOCH_CHECKPOINT)]
        kept = any(now.reached(one) and not before.reached(one) for one in here)
        return at_interval(state, event), kept

    return due
