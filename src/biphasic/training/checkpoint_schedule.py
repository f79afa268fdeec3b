"""Decide after each batch whether to save a checkpoint, and whether to keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from composer.core import Event, State
from composer.utils import create_interval_scheduler

from biphasic.config.checkpoint_plan import branch_points
from biphasic.config.durations import Elapsed
from biphasic.config.pretrain import PretrainConfig
from biphasic.training.objective_schedule import elapsed


def checkpoint_schedule(config: PretrainConfig) -> Callable[[State, Event], tuple[bool, bool]]:
    """Return a function of Composer's state and event: whether the interval is due, and whether to save and keep."""
    at_interval = create_interval_scheduler(str(config.checkpoint.interval))
    points = branch_points(config)

    def is_due(state: State, event: Event) -> tuple[bool, bool]:
        if state.previous_timestamp is None:
            return False, False
        before, now = elapsed(state.previous_timestamp), trained(state)
        kept = any(now.reached(point) and not before.reached(point) for point in points)
        return at_interval(state, event), kept

    return is_due


def trained(state: State) -> Elapsed:
    """Return the counts after the last batch. Composer counts an epoch only after the checkpoint of its last batch."""
    now = elapsed(state.timestamp)
    # Not `state.dataloader`, which is the validation's while it runs.
    batches: Any = state.train_dataloader
    skipped = batches.dataset.skipped_batches if now.epochs == 0 else 0
    is_last = state.timestamp.batch_in_epoch.value + skipped == len(batches)
    return replace(now, epochs=now.epochs + is_last)
