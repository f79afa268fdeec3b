"""Which checkpoints a pretraining run saves, which of them it keeps, and how many it stores at a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from biphasic.config.durations import Duration
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import decay_start, spans


@dataclass(frozen=True)
class CheckpointCounts:
    """Numbers of checkpoints of a run.

    Attributes:
        saved: checkpoints that the run saves, over its whole length.
        kept: checkpoints that are stored at its end.
        most: the largest number that is stored at a time, with the one that is being written.
    """

    saved: int
    kept: int
    most: int


def branch_points(config: PretrainConfig) -> list[Duration]:
    """Return the points where other runs may branch off: each phase switch, the decay's start, `checkpoint.keep_at`.

    A run always saves at these points and keeps the checkpoints, regardless of `checkpoint.interval` and `checkpoint.keep`.
    """
    max_duration = config.max_duration
    switches = [span.start for span in spans(config.objective.phases, max_duration)[1:]]
    decay = decay_start(config.schedule, max_duration)
    decays = [decay] if decay != max_duration and decay.value else []
    return list(
        dict.fromkeys([*switches, *decays, *(point.resolve(max_duration) for point in config.checkpoint.keep_at)])
    )


def count_checkpoints(config: PretrainConfig) -> CheckpointCounts | None:
    """Count the checkpoints of a run that is not interrupted. Return None if it depends on the size of an epoch.

    If durations are given in tokens, padding makes the run a little longer than assumed here.
    """
    end, every = config.max_duration, config.checkpoint.interval.resolve(config.max_duration)
    points = branch_points(config)
    if "ep" in (end.unit, every.unit, *(point.unit for point in points)):
        return None

    def batch_at(time: Duration) -> int:
        return math.ceil(round(config.batch_shape.batches(time), 6))

    last, step = batch_at(end), max(batch_at(every), 1)
    kept = sorted({batch_at(point) for point in points})
    saved = sorted({*range(step, last + 1, step), *kept, last})
    keep = len(saved) if config.checkpoint.keep < 0 else config.checkpoint.keep

    def stored_after(number: int) -> int:
        """Return how many checkpoints are stored once the first `number` are complete."""
        if number <= keep:
            return number
        return keep + bisect_right(kept, saved[number - keep - 1])

    return CheckpointCounts(
        saved=len(saved),
        kept=stored_after(len(saved)),
        most=max(stored_after(number) for number in range(len(saved))) + 1,
    )
