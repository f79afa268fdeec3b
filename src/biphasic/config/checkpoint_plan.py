"""Which checkpoints a pretraining run saves, and which of them remain."""

from __future__ import annotations

from collections.abc import Iterable

from biphasic.config.durations import Duration
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import decay_start, resolve_phases


def branch_points(config: PretrainConfig) -> list[Duration]:
    """Return the points where other runs may branch off: each phase switch, the decay's start, `checkpoint.keep_at`.

    A run always saves at these points and keeps the checkpoints, regardless of `checkpoint.interval` and `checkpoint.keep`.
    """
    total = config.max_duration
    switches = [span.start for span in resolve_phases(config.objective.phases, total)[1:]]
    decay = decay_start(config.schedule, total)
    decays = [decay] if decay != total and decay.value else []
    return list(dict.fromkeys([*switches, *decays, *(point.resolve(total) for point in config.checkpoint.keep_at)]))


def saved_checkpoints(config: PretrainConfig, start: int = 0, marked: Iterable[int] = ()) -> tuple[list[int], set[int]]:
    """Return the batches at which an uninterrupted run saves, and those whose checkpoints it never deletes.

    Args:
        config: a configuration without times in epochs. With times in tokens, padding makes the run a little longer.
        start: number of batches that another run has trained.
        marked: batches, besides the branch points, whose checkpoints are never deleted.
    """
    shape, total = config.batch_shape, config.max_duration
    end, every = shape.batches(total), shape.batches(config.checkpoint.interval.resolve(total))
    kept = {batch for batch in (*map(shape.batches, branch_points(config)), *marked) if start < batch < end}
    at_interval = range(start // every * every + every, end, every)
    return sorted({*at_interval, *kept, end}), kept


def remaining_checkpoints(saved: list[int], kept: set[int], keep: int) -> list[int]:
    """Return which checkpoints are stored when those of the batches `saved` are complete, of which `kept` are never deleted.

    Args:
        saved: batches of the checkpoints, in order.
        kept: batches whose checkpoints are never deleted.
        keep: `checkpoint.keep`.
    """
    return saved if keep < 0 else sorted(kept.intersection(saved).union(saved[-keep:]))
