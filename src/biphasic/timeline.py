"""Compute the phase and the learning rate of any batch, from durations and the run's progress alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biphasic.durations import Duration, TrainingProgress

START = Duration(0, "ba")


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase from `start` (inclusive) to `end` (exclusive). Neither time is in `dur`."""

    index: int
    phase: Any
    start: Duration
    end: Duration

    def share(self, elapsed: TrainingProgress) -> float:
        """Return the share of the phase that has passed at `elapsed`, a time in it.

        Raises a ValueError if its start and end have different units.
        """
        if self.start.value and self.start.unit != self.end.unit:
            raise ValueError(f"expected the start ({self.start}) and the end ({self.end}) of a phase in the same unit")
        return (elapsed.in_unit(self.end.unit) - self.start.value) / (self.end.value - self.start.value)


def resolve_phases(phases: Sequence[Any], max_duration: Duration, epoch: int | None = None) -> list[ResolvedPhase]:
    """Return the interval of each phase, which ends at its `until`. Shares are converted to the unit of `max_duration`.

    A share that is not a whole number of epochs is converted to batches, with `epoch`, their number in an epoch.
    """
    spans, start = [], START
    for index, phase in enumerate(phases):
        until = max_duration if phase.until is None else Duration.parse(phase.until)
        end = until.resolve(max_duration, None if until.is_whole_of(max_duration) else epoch)
        spans.append(ResolvedPhase(index, phase, start, end))
        start = end
    return spans


def phase_at(resolved_phases: Sequence[ResolvedPhase], elapsed: TrainingProgress) -> ResolvedPhase:
    """Return the phase of the batch that begins at `elapsed`: the last phase that has started."""
    return next(span for span in reversed(resolved_phases) if elapsed.reached(span.start))


def decay_start(schedule: Any, max_duration: Duration, epoch: int | None = None) -> Duration:
    """Return when the learning rate begins to fall; `max_duration` without a decay. The others are as below."""
    end = max_duration.resolve(max_duration, epoch)
    return Duration(end.value - schedule.decay.resolve(max_duration, epoch).value, end.unit)


def learning_rate_factor(
    schedule: Any, max_duration: Duration, elapsed: TrainingProgress, epoch: int | None = None
) -> float:
    """Return the learning rate of the batch that begins at `elapsed`, relative to the peak learning rate.

    It rises linearly from 0 during warmup (the first batch has rate 0, as in EuroBERT's code), stays at 1, and then
    decays to `final_lr` at the end. `schedule` has `warmup` and `decay` (durations), `decay_shape` and `final_lr`. `epoch`
    is the number of batches in an epoch: progress in epochs has no steps within one.
    """
    warmup = schedule.warmup.resolve(max_duration, epoch)
    if not elapsed.reached(warmup):
        return elapsed.in_unit(warmup.unit) / warmup.value
    start, end = decay_start(schedule, max_duration, epoch), max_duration.resolve(max_duration, epoch)
    done = elapsed.in_unit(start.unit) - start.value
    if done <= 0 or start == end:
        return 1.0
    share = min(done / (end.value - start.value), 1.0)  # a resumed run's earlier epochs may have had more batches
    shapes = {"linear": 1 - share, "1-sqrt": 1 - math.sqrt(share), "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return schedule.final_lr + (1 - schedule.final_lr) * shapes[schedule.decay_shape]
