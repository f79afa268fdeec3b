"""The progress of a run after a batch, and whether to validate or save then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from composer.core import State

from biphasic.durations import Duration, TrainingProgress


def interval_schedule(interval: Duration | None, end: Duration) -> Callable[[State], bool]:
    """Return a function of Composer's state: whether an interval, or the run (`end`), has ended with the last batch.

    It is never so without an interval. Composer's own scheduler rounds shares of a run in another way than `--plan`, and
    takes none if phases' data differ.
    """
    if interval is None:
        return lambda state: False
    every = interval.resolve(end)

    def is_due(state: State) -> bool:
        if state.previous_timestamp is None:
            return False
        before, now = TrainingProgress.of(state.previous_timestamp), progress_after_batch(state)
        passed = now.in_unit(every.unit) // every.value > before.in_unit(every.unit) // every.value
        return passed or now.reached(end)

    return is_due


def progress_after_batch(state: State) -> TrainingProgress:
    """Return the counts after the last batch. Composer counts an epoch only after the checkpoint of its last batch."""
    now = TrainingProgress.of(state.timestamp)
    # Not `state.dataloader`, which is the validation's while it runs.
    batches: Any = state.train_dataloader
    return replace(now, epochs=batches.ended_epochs(now.batches))
