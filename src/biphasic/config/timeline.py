"""Schema of training phases and the learning-rate schedule, and the phase and learning rate of any batch.

Only this module computes phases and learning rates. Both depend only on the configuration and the run's progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import KeyProblems, Positive, Section, Share
from biphasic.config.data import PhaseDataConfig
from biphasic.config.durations import BatchShapes, Duration, TrainingProgress

START = Duration(0, "ba")
_COUNTED = "batches (ba), rows (sp) or tokens (tok)"


class RampConfig(Section):
    """A masking ratio that changes linearly from `start` to `end` during its phase."""

    start: Share
    """Masking ratio of the phase's first batch."""
    end: Share
    """Masking ratio at the end of the phase."""

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"


class ReplacementConfig(Section):
    """How selected tokens are replaced; the shares add up to 1. Default: always by the mask token, as in EuroBERT's code."""

    mask: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share that becomes the mask token."""
    random: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share that becomes a random token of the vocabulary, special tokens excluded. BERT: 0.1."""
    keep: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share that stays as it is, and is predicted. BERT: 0.1."""


class PhaseModelConfig(Section):
    """What a phase changes in the model."""

    rope_theta: Annotated[float, Field(gt=0)]
    """Base of the rotary position embeddings from this phase on."""


class _Phase(Section):
    name: str
    until: Duration | None = None
    """End of the phase, counted from the start of the run. Omit it for the last phase, which ends with the run."""
    reset_optimizer: bool = False
    """Whether to reset the optimizer state when this phase begins."""
    data: PhaseDataConfig | None = None
    """Training data from this phase on. Null: that of the phase before, which goes on where it was. The first phase has the
    run's `data`. Data that an earlier phase has read goes on where that phase left it."""
    global_batch_size: Positive | None = None
    """Number of rows in an optimizer step from this phase on. Null: as before."""
    model: PhaseModelConfig | None = None
    """What changes in the model from this phase on. Null: nothing."""


class CLMPhase(_Phase):
    """Causal language modeling: each token predicts the next token of its segment."""

    name: Literal["clm"]  # pyright: ignore[reportIncompatibleVariableOverride]


class MLMPhase(_Phase):
    """Masked language modeling: masked tokens are predicted from the tokens on both sides in their segment."""

    name: Literal["mlm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    masking_ratio: Share | RampConfig = 0.4
    """Probability with which each token is selected, independently. The paper compares 0.2, 0.3, 0.4 and 0.5 (0.4 in its
    biphasic runs)."""
    replacement: ReplacementConfig = ReplacementConfig()
    """What stands in place of the selected tokens."""
    target: Literal["same", "next"] = "same"
    """`same`: predict a masked token at its own position. `next`: predict it at the previous position, as in CLM, so that
    the head's offset stays the same when the objective changes (masked next-token prediction)."""


Phase = Annotated[CLMPhase | MLMPhase, Field(discriminator="name")]


class ObjectiveConfig(Section):
    """The phases of training, in order."""

    phases: Annotated[list[Phase], Field(min_length=1)]
    """The phases. Each but the last needs `until`."""


class ScheduleConfig(Section):
    """Warmup-stable-decay (WSD) schedule: the learning rate rises from 0, stays constant, and falls at the end."""

    warmup: Duration = Duration(0, "ba")
    """Length of the linear warmup from 0. The paper: 2,000 batches."""
    decay: Duration = Duration(0, "ba")
    """Length of the decay at the end of the run. 0ba: no decay, for a trunk from which other runs branch off."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """Course of the decay. The paper: linear."""
    final_lr: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate at the end of the decay, as a share of `optimizer.lr`."""


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase from `start` (inclusive) to `end` (exclusive). Neither time is in `dur`."""

    index: int
    phase: CLMPhase | MLMPhase
    start: Duration
    end: Duration

    def masking_ratio(self, elapsed: TrainingProgress) -> float:
        """Return the MLM masking ratio at `elapsed`, a time in this phase. A ramp reaches `end` at the phase's end."""
        assert isinstance(self.phase, MLMPhase)
        ratio = self.phase.masking_ratio
        if not isinstance(ratio, RampConfig):
            return ratio
        share = (elapsed.in_unit(self.end.unit) - self.start.value) / (self.end.value - self.start.value)
        return ratio.start + (ratio.end - ratio.start) * share


def resolve_phases(phases: list[CLMPhase | MLMPhase], max_duration: Duration) -> list[ResolvedPhase]:
    """Return the interval of each phase. Shares are converted to the unit of `max_duration`."""
    spans, start = [], START
    for index, phase in enumerate(phases):
        end = max_duration if phase.until is None else phase.until.resolve(max_duration)
        spans.append(ResolvedPhase(index, phase, start, end))
        start = end
    return spans


def phase_at(resolved_phases: list[ResolvedPhase], elapsed: TrainingProgress) -> ResolvedPhase:
    """Return the phase of the batch that begins at `elapsed`: the last phase that has started."""
    return next(span for span in reversed(resolved_phases) if elapsed.reached(span.start))


def decay_start(schedule: ScheduleConfig, max_duration: Duration) -> Duration:
    """Return when the learning rate begins to fall; `max_duration` without a decay."""
    return Duration(max_duration.value - schedule.decay.resolve(max_duration).value, max_duration.unit)


def learning_rate_factor(schedule: ScheduleConfig, max_duration: Duration, elapsed: TrainingProgress) -> float:
    """Return the learning rate of the batch that begins at `elapsed`, relative to the peak learning rate.

    It rises linearly from 0 during warmup (the first batch has rate 0, as in EuroBERT's code), stays at 1, and then
    decays to `final_lr` at the end of the run.
    """
    warmup = schedule.warmup.resolve(max_duration)
    if not elapsed.reached(warmup):
        return elapsed.in_unit(warmup.unit) / warmup.value
    start = decay_start(schedule, max_duration)
    done = elapsed.in_unit(start.unit) - start.value
    if done <= 0:
        return 1.0
    share = done / (max_duration.value - start.value)
    shapes = {"linear": 1 - share, "1-sqrt": 1 - math.sqrt(share), "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return schedule.final_lr + (1 - schedule.final_lr) * shapes[schedule.decay_shape]


def phase_problems(phases: list[CLMPhase | MLMPhase], max_duration: Duration, batch: BatchShapes) -> KeyProblems:
    """Check the phases of a run of `max_duration`."""
    for index, phase in enumerate(phases):
        key = f"objective.phases.{index}"
        if index == len(phases) - 1 and phase.until is not None:
            yield [f"{key}.until"], "the last phase runs to the end (max_duration): remove this key"
        if index < len(phases) - 1 and phase.until is None:
            yield [f"{key}.until"], "is missing: only the last phase is open-ended"
        if isinstance(phase, MLMPhase):
            shares = phase.replacement
            if abs(shares.mask + shares.random + shares.keep - 1) > 1e-9:
                message = f"mask, random and keep must add up to 1; got {shares.mask} + {shares.random} + {shares.keep}"
                yield [f"{key}.replacement"], message
    if any(phase.until is None for phase in phases[:-1]) or phases[-1].until is not None:
        return
    for span in resolve_phases(phases, max_duration):
        key, until = f"objective.phases.{span.index}", span.phase.until
        if until is not None and not until.is_whole_of(max_duration):
            message = f"expected whole epochs, or a length in another unit; got {until} of {max_duration}"
            yield [f"{key}.until", "max_duration"], message
        if span.phase.until is not None and batch.not_before(span.end, max_duration):
            message = f"the phase must end before the run does (max_duration: {max_duration}); got {span.end}"
            yield [f"{key}.until", "max_duration"], message
        elif span.phase.until is not None and batch.not_before(span.start, span.end):
            yield [f"{key}.until"], f"the phase must end after it starts ({span.start}); got {span.end}"
        ramps = isinstance(span.phase, MLMPhase) and isinstance(span.phase.masking_ratio, RampConfig)
        if ramps and span.start.value and span.start.unit != span.end.unit:
            message = f"a ramp needs its phase's start ({span.start}) and end ({span.end}) in the same unit"
            yield [f"{key}.masking_ratio"], message
        elif ramps and span.end.unit == "ep":
            message = f"a ramp needs its phase's end in {_COUNTED}, not in epochs; got {span.end}"
            yield [f"{key}.masking_ratio", f"{key}.until", "max_duration"], message


def schedule_problems(schedule: ScheduleConfig, max_duration: Duration, batch: BatchShapes) -> KeyProblems:
    """Check the warmup and decay of a run of `max_duration`."""
    if schedule.decay.unit not in ("dur", max_duration.unit) and schedule.decay.value:
        message = f"expected the unit of max_duration ({max_duration}) or dur, since the decay ends with the run"
        yield ["schedule.decay", "max_duration"], message
        return
    warmup, decay = schedule.warmup.resolve(max_duration), schedule.decay.resolve(max_duration)
    in_epochs = [name for name, time in (("warmup", warmup), ("decay", decay)) if time.value and time.unit == "ep"]
    for name in in_epochs:
        subject = "expected the length of the warmup" if name == "warmup" else "a decay needs max_duration"
        message = f"{subject} in {_COUNTED}, not in epochs; got {getattr(schedule, name)} of {max_duration}"
        yield [f"schedule.{name}", "max_duration"], message
    if in_epochs:
        return
    if batch.not_before(warmup, max_duration):
        yield ["schedule.warmup", "max_duration"], f"expected less than max_duration ({max_duration})"
    elif warmup.value and decay.value and batch.tokens(warmup) > batch.tokens(decay_start(schedule, max_duration)):
        message = f"warmup ({schedule.warmup}) and decay ({schedule.decay}) are longer than the run ({max_duration})"
        yield ["schedule.warmup", "schedule.decay", "max_duration"], message
    if decay.value > max_duration.value:
        yield ["schedule.decay", "max_duration"], f"expected at most max_duration ({max_duration})"
    if not decay.value:
        message = "has no effect without a decay: set schedule.decay as well"
        yield from schedule.require_defaults(("decay_shape", "final_lr"), "schedule", ["schedule.decay"], message)
