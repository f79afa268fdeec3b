"""The progress of a run after a batch, and whether to validate then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from composer.core import Event, State, Timestamp

from biphasic.config.durations import TrainingProgress
from biphasic.config.pretrain import PretrainConfig


def elapsed(time: Timestamp) -> TrainingProgress:
    """Convert a Composer timestamp to counts."""
    return TrainingProgress(time.batch.value, time.sample.value, time.token.value, time.epoch.value)


def validation_schedule(config: PretrainConfig, is_stopping: Callable[[], bool]) -> Callable[[State, Event], bool]:
    """Return a function of Composer's state and event: whether to validate now.

    It is due at each interval and after the last batch, unless the run stops (`is_stopping`). Validation precedes the
    batch's checkpoint, which then has the losses. Composer's own scheduler would validate at the end of training, after
    the last checkpoint.
    """
    end = config.max_duration
    every = (config.evaluation.interval or end).resolve(end)

    def is_due(state: State, event: Event) -> bool:
        if event != Event.BATCH_END or state.previous_timestamp is None or is_stopping():
            return False
        before, now = elapsed(state.previous_timestamp), progress_after_batch(state)
        passed = now.in_unit(every.unit) // every.value > before.in_unit(every.unit) // every.value
        return passed or now.reached(end)

    return is_due


def progress_after_batch(state: State) -> TrainingProgress:
    """Return the counts after the last batch. Composer counts an epoch only after the checkpoint of its last batch."""
    now = elapsed(state.timestamp)
    # Not `state.dataloader`, which is the validation's while it runs.
    batches: Any = state.train_dataloader
    return replace(now, epochs=batches.ended_epochs(now.batches))
