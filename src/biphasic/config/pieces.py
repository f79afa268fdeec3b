"""Split a run into pieces of time in which the objective, or the learning rate, is one function of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import (
    START,
    BatchShape,
    MLMPhase,
    RampConfig,
    Span,
    decay_start,
    learning_rate_factor,
    spans,
)

BATCHES, TOKENS, EPOCHS = "ba", "tok", "ep"
"""Clocks: units that convert to each other before the data is read. Rows are counted on the clock of batches."""
_FAR = 2**62
"""A count on another clock, beyond every duration."""


@dataclass(frozen=True)
class Time:
    """A time at which batches can begin, on one of the clocks."""

    clock: str
    value: int

    def elapsed(self, shape: BatchShape) -> Elapsed:
        """Return this time as counts. The other clocks, which can't be known, are beyond every duration."""
        batches, rows = (self.value, self.value * shape.rows) if self.clock == BATCHES else (_FAR, _FAR)
        tokens, epochs = (self.value if self.clock == clock else _FAR for clock in (TOKENS, EPOCHS))
        return Elapsed(batches, rows, tokens, epochs) if self.value else Elapsed(0, 0, 0, 0)

    def first_batch(self, shape: BatchShape) -> int:
        """Return the earliest batch that can begin at or after this time."""
        return -(-self.value // (shape.rows * shape.row_length)) if self.clock == TOKENS else self.value

    def is_certainly_reached(self, by: Time, shape: BatchShape) -> bool:
        """Return whether a run has certainly reached this time once it has reached `by`."""
        if self.clock == by.clock or not self.value:
            return by.value >= self.value
        return self.clock == BATCHES and by.first_batch(shape) >= self.value


BEGINNING = Time(BATCHES, 0)


def clock_time(duration: Duration, shape: BatchShape) -> Time:
    """Return the time of the first batch that begins at or after `duration` (not in `dur`)."""
    if duration.unit == "sp":
        return Time(BATCHES, -(-int(duration.value) // shape.rows))
    return Time(duration.unit, int(duration.value)) if duration.value else BEGINNING


def _exact(duration: Duration, shape: BatchShape) -> tuple[str, Fraction]:
    """Return a form of `duration` that is equal for durations that are equal in every run. Rows become batches."""
    if duration.unit == "sp":
        return BATCHES, Fraction(int(duration.value), shape.rows)
    return (duration.unit if duration.value else BATCHES), Fraction(int(duration.value))


@dataclass(frozen=True)
class Piece:
    """A part of a run in which the objective or the learning rate is one function of time.

    Attributes:
        start: when it begins. It ends where the next piece begins.
        fields: what determines the function.
        prefix: what stands before a field's name in its key.
        start_key: the key that says when the piece begins.
        until_key: the key that says when it ends.
        texts: values by key, for messages.
        clock: clock on which the value changes; None if it is constant.
        value: returns the masking ratio or the learning rate of a batch of this piece.
        resets: whether the optimizer state is cleared when the piece begins.
    """

    start: Time
    fields: dict[str, object]
    prefix: str
    start_key: str
    until_key: str
    texts: dict[str, str]
    clock: str | None
    value: Callable[[Elapsed], float | None]
    resets: bool = False

    def boundary(self, begins: bool) -> str:
        """Return the key of the boundary at which this piece begins or, if it has begun before, will end."""
        return self.start_key if begins else self.until_key


def _append(pieces: list[Piece], piece: Piece, shape: BatchShape) -> None:
    """Append a piece. Remove pieces without a batch, and join pieces that train alike."""
    while pieces and piece.start.is_certainly_reached(pieces[-1].start, shape):
        pieces.pop()
    if pieces and not piece.resets and pieces[-1].fields == piece.fields:
        joined = pieces.pop()
        piece = replace(joined, until_key=piece.until_key, texts={**piece.texts, **joined.texts})
    pieces.append(piece)


def objective_pieces(config: PretrainConfig) -> list[Piece]:
    """Return the phases as pieces."""
    shape, end, pieces = config.batch_shape, config.max_duration, list[Piece]()
    ends = [
        "0ba",
        *("the end" if phase.until is None else _text(phase.until, end) for phase in config.objective.phases),
    ]
    for span in spans(config.objective.phases, end):
        start, phase, index, clock = clock_time(span.start, shape), span.phase, span.index, None
        prefix = f"objective.phases.{index}."
        start_key, until_key = f"objective.phases.{max(index - 1, 0)}.until", f"{prefix}until"
        texts = {start_key: ends[index], until_key: ends[index + 1], f"{prefix}name": phase.name}
        texts[f"{prefix}reset_optimizer"] = str(phase.reset_optimizer).lower()
        fields: dict[str, object] = {"name": phase.name}
        if isinstance(phase, MLMPhase):
            ratio: object = phase.masking_ratio
            texts[f"{prefix}masking_ratio"] = str(ratio)
            if isinstance(phase.masking_ratio, RampConfig):
                ramp = phase.masking_ratio
                ratio = ramp.start
                texts[f"{prefix}masking_ratio"] = f"{ramp.start} to {ramp.end} at {span.end}"
                if ramp.start != ramp.end:
                    clock = clock_time(span.end, shape).clock
                    ratio = (ramp.start, ramp.end, _exact(span.start, shape), _exact(span.end, shape))
            shares = phase.replacement
            fields |= {"masking_ratio": ratio, "target": phase.target, "replacement": (shares.random, shares.keep)}
            texts[f"{prefix}target"] = phase.target
            texts[f"{prefix}replacement"] = f"mask {shares.mask:g}, random {shares.random:g}, keep {shares.keep:g}"
        resets = phase.reset_optimizer and start != BEGINNING
        value = partial(_masking_ratio, span)
        _append(pieces, Piece(start, fields, prefix, start_key, until_key, texts, clock, value, resets), shape)
    return pieces


def _masking_ratio(span: Span, elapsed: Elapsed) -> float | None:
    return span.masking_ratio(elapsed) if isinstance(span.phase, MLMPhase) else None


def rate_pieces(config: PretrainConfig) -> list[Piece]:
    """Return warmup, stable part and decay of the learning rate as pieces."""
    schedule, end, shape, lr = config.schedule, config.max_duration, config.batch_shape, config.optimizer.lr
    warmup, decay, pieces = schedule.warmup.resolve(end), decay_start(schedule, end), list[Piece]()
    texts = {
        "optimizer.lr": repr(lr),
        "schedule.warmup": _text(schedule.warmup, end),
        "schedule.decay": f"from {decay} to {end}" if decay != end else "no decay",
        "schedule.decay_shape": schedule.decay_shape,
        "schedule.final_lr": repr(schedule.final_lr),
    }

    def append(start: Duration, changes_to: Duration | None, start_key: str, until_key: str, **fields: object) -> None:
        clock = None if changes_to is None else clock_time(changes_to, shape).clock
        all_fields = {"optimizer.lr": lr, **{f"schedule.{name}": field for name, field in fields.items()}}
        value = partial(_learning_rate, config, clock)
        time = clock_time(start, shape)
        _append(pieces, Piece(time, all_fields, "", start_key, until_key, texts, clock, value), shape)

    if warmup.value:
        append(START, warmup, "schedule.warmup", "schedule.warmup", warmup=_exact(warmup, shape))
    append(warmup, None, "schedule.warmup", "schedule.decay")
    if decay != end:
        # The warmup comes first if the two overlap, which can't be excluded for durations in different units.
        overlap = clock_time(decay, shape).is_certainly_reached(clock_time(warmup, shape), shape)
        append(
            warmup if overlap else decay,
            end,
            "schedule.decay",
            "schedule.decay",
            decay=(_exact(decay, shape), _exact(end, shape)),
            decay_shape=schedule.decay_shape,
            final_lr=schedule.final_lr,
        )
    return pieces


def _learning_rate(config: PretrainConfig, clock: str | None, elapsed: Elapsed) -> float:
    if clock is None:
        return config.optimizer.lr
    return config.optimizer.lr * learning_rate_factor(config.schedule, config.max_duration, elapsed)


def _text(duration: Duration, total: Duration) -> str:
    return f"{duration.resolve(total)} ({duration} of {total})" if duration.unit == "dur" else str(duration)
