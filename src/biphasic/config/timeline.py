"""Which phase and which learning rate a run is in, from its counts alone: the one place where either is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.schema import CLMPhase, MLMPhase, RampConfig, ScheduleConfig

START = Duration(0, "ba")


@dataclass(frozen=True)
class Span:
    """A phase and where it lies: from `start` (included) to `end` (not included), neither of them a share."""

    index: int
    phase: CLMPhase | MLMPhase
    start: Duration
    end: Duration

    def masking_ratio(self, elapsed: Elapsed) -> float:
        """The MLM masking ratio at `elapsed`; a ramp reaches its `end` where the phase ends."""
        assert isinstance(self.phase, MLMPhase)
        ratio = self.phase.masking_ratio
        if not isinstance(ratio, RampConfig):
            return ratio
        begin = self.start.value if self.start.value else 0.0
        share = (elapsed.in_unit(self.end.unit) - begin) / (self.end.value - begin)
        return ratio.start + (ratio.end - ratio.start) * min(max(share, 0.0), 1.0)


def spans(phases: list[CLMPhase | MLMPhase], max_duration: Duration) -> list[Span]:
    """Lay the phases out over a run of `max_duration`; shares become its unit."""
    found, start = [], START
    for index, phase in enumerate(phases):
        end = max_duration if phase.until is None else phase.until.of(max_duration)
        found.append(Span(index, phase, start, end))
        start = end
    return found


def span_at(laid_out: list[Span], elapsed: Elapsed) -> Span:
    """The phase of the batch that begins at `elapsed`: the last one whose start has been reached."""
    return next(span for span in reversed(laid_out) if elapsed.reached(span.start))


def decay_start(schedule: ScheduleConfig, max_duration: Duration) -> Duration:
    """Where the learning rate begins to fall; `max_duration` itself when it doesn't."""
    decay = schedule.decay.of(max_duration)
    return Duration(max_duration.value - decay.value, max_duration.unit) if decay.value else max_duration


def learning_rate_factor(schedule: ScheduleConfig, max_duration: Duration, elapsed: Elapsed) -> float:
    """Warmup-stable-decay: what the learning rate is multiplied by for the batch that begins at `elapsed`.

    Linear warmup from 0 (the first batch has rate 0, as in EuroBERT's code), then 1, then the decay's shape down to
    `final_lr`, which is reached at `max_duration`.
    """
    warmup = schedule.warmup.of(max_duration)
    if not elapsed.reached(warmup):
        return elapsed.in_unit(warmup.unit) / warmup.value
    start = decay_start(schedule, max_duration)
    done = elapsed.in_unit(start.unit) - start.value
    if done <= 0 or start == max_duration:
        return 1.0
    share = min(done / (max_duration.value - start.value), 1.0)
    left = {"linear": 1 - share, "1-sqrt": 1 - math.sqrt(share), "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return schedule.final_lr + (1 - schedule.final_lr) * left[schedule.decay_shape]
