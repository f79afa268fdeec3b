"""Compare the histories of two pretraining runs: from which batch on, and in which key, they train differently.

A run is the history of its batches. Keys such as the model, the data and the seed affect every batch. The phases, and the
parts of the schedule (warmup, constant rate, decay), follow each other; each has a rule for its batches. So two runs are
the same up to the first phase or part that begins at another time or has another rule. What a restart may change, where a
run may start from another run's checkpoint, and which batches the runs of a study share all follow from `first_difference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from biphasic.config.base import flatten
from biphasic.config.durations import BatchShape, Duration, Elapsed
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import START, MLMPhase, RampConfig, decay_start, spans

_PATHS = {"local", "remote"}
_NO_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("run_name", "output", "start_from", "microbatch_size", "evaluation", "checkpoint"), True),
    **dict.fromkeys(("parallelism", "compute", "logging"), True),
    "tokenizer": True,  # a path; the tokenizer's hash is compared with the data's
    "optimizer": {"lr", "max_skipped_batches"},
    "data": {
        **dict.fromkeys(("folder", "cache", "validation", "predownload", "cache_limit", "download_retry"), True),
        **dict.fromkeys(("download_timeout", "num_workers", "check_hashes"), True),
        # Training data is compared by the hash of its index.
        "train": _PATHS,
        "mix": {"__all__": _PATHS},
    },
    # Their effect depends on the batch.
    **dict.fromkeys(("max_duration", "objective", "schedule"), True),
}
"""Keys and sections that don't affect the weights, or not in the same way at each batch."""


@dataclass(frozen=True)
class Difference:
    """Where two histories part.

    Attributes:
        batch: first batch that is trained differently, counted from 0. If it depends on the data's padding or on the length
            of an epoch, this is the earliest possible batch.
        key: the key that differs, as in the second configuration.
        first: value of the key in the first configuration, as text.
        second: the same of the second configuration.
        times: the histories are equal for batches that begin before all of these times.
    """

    batch: int
    key: str
    first: str
    second: str
    times: tuple[Duration, ...]

    def is_past(self, last_batch: Elapsed) -> bool:
        """Return whether a run whose last batch began at `last_batch` may have trained it differently."""
        return any(last_batch.reached(time) for time in self.times)


def first_difference(first: PretrainConfig, second: PretrainConfig, overrides: Sequence[str] = ()) -> Difference | None:
    """Return the first batch that two configurations train differently, and a key that differs.

    Keys that affect every batch are compared once: a difference there is at batch 0. Phases and parts of the schedule are
    compared in order. Keys that don't affect the weights, such as paths and the number of ranks, are ignored. The lengths
    of the runs are not a difference in themselves: only batches that both runs have are compared.

    How many tokens a batch has depends on its padding, and how many batches an epoch has depends on the data. So times in
    `tok` are compared with each other, and so are times in `ep`, but a time in `tok` or `ep` differs from any time in
    another unit. `Difference.batch` is then the earliest possible batch: a batch has at most `BatchShape`'s tokens, and an
    epoch at least one batch.

    Args:
        first: a checked configuration.
        second: another one.
        overrides: keys or sections that may differ (`checkpoint.resume_overrides`).

    Returns:
        The first difference, or None if the shorter history is the beginning of the longer one.
    """
    constant = next(constant_differences(first, second, overrides), None)
    if constant is not None:
        return constant
    histories = [(_phases(config), _rates(config)) for config in (first, second)]
    found = [_compare(first, second, one, other, overrides) for one, other in zip(*histories, strict=True)]
    differences = sorted(filter(None, found), key=lambda difference: difference.batch)
    if not differences:
        return None
    # In other units, the other difference may come first.
    return replace(differences[0], times=tuple(time for difference in differences for time in difference.times))


def constant_differences(
    first: PretrainConfig, second: PretrainConfig, overrides: Sequence[str] = ()
) -> Iterator[Difference]:
    """Yield the differing keys that affect every batch, in alphabetical order."""
    before, now = _constants(first), _constants(second)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not is_overridden(key, overrides):
            old, new = (repr(values[key]) if key in values else "nothing" for values in (before, now))
            yield Difference(0, key, old, new, (START,))


def is_overridden(key: str, overrides: Sequence[str]) -> bool:
    """Return whether a key is one of `overrides`, or within a section that is."""
    return any(key == name or key.startswith(f"{name}.") for name in overrides)


def _constants(config: PretrainConfig) -> dict[str, Any]:
    """Return the keys that affect every batch, with their values."""
    return dict(flatten(config.model_dump(mode="json", exclude=_NO_EFFECT, exclude_none=True)))


@dataclass(frozen=True)
class _Part:
    """A phase, or a part of the schedule.

    Attributes:
        start: when it begins, in batches, tokens or epochs.
        start_key: the key that determines `start`.
        start_text: the value of that key, for messages.
        rule: what determines its batches, by key. Times are written as the batch, tokens or epochs that they are.
        end: the key that determines its end, and the value of that key.
    """

    start: Duration
    start_key: str
    start_text: str
    rule: dict[str, str]
    end: tuple[str, str]

    def text(self, key: str) -> str:
        """Return the value of a key for messages."""
        return self.start_text if key == self.start_key else self.rule.get(key, "nothing")


def _phases(config: PretrainConfig) -> list[_Part]:
    """Return the phases of a run."""
    parts, end = list[_Part](), config.max_duration
    start_key, start_text = "objective.phases.0.until", "0ba"
    for span in spans(config.objective.phases, end):
        phase, key = span.phase, f"objective.phases.{span.index}"
        rule = {f"{key}.name": phase.name}
        if isinstance(phase, MLMPhase):
            ratio, shares = phase.masking_ratio, phase.replacement
            ramp = f"{ratio.start} to {ratio.end} at {span.end}" if isinstance(ratio, RampConfig) else str(ratio)
            rule |= {f"{key}.masking_ratio": ramp, f"{key}.target": phase.target}
            rule[f"{key}.replacement"] = f"mask {shares.mask}, random {shares.random}, keep {shares.keep}"
        if span.index:
            rule[f"{key}.reset_optimizer"] = str(phase.reset_optimizer).lower()
        until = (f"{key}.until", "the end" if phase.until is None else _text(phase.until, end))
        parts.append(_Part(_start(span.start, config.batch_shape), start_key, start_text, rule, until))
        start_key, start_text = until
    return parts


def _rates(config: PretrainConfig) -> list[_Part]:
    """Return warmup, constant part and decay of the learning rate."""
    schedule, end, shape = config.schedule, config.max_duration, config.batch_shape
    warmup, decay = schedule.warmup.resolve(end), decay_start(schedule, end)
    rate = {"optimizer.lr": repr(config.optimizer.lr)}
    rises = ("schedule.warmup", _text(schedule.warmup, end))
    falls = ("schedule.decay", f"from {decay} to {end}" if decay != end else "no decay")
    parts = [
        _Part(_start(START, shape), *rises, {**rate, "schedule.warmup": str(warmup if warmup.value else START)}, rises),
        _Part(_start(warmup, shape), *rises, rate, falls),
    ]
    if decay != end:
        course = {falls[0]: falls[1], "schedule.decay_shape": schedule.decay_shape}
        course["schedule.final_lr"] = repr(schedule.final_lr)
        parts.append(_Part(_start(decay, shape), *falls, {**rate, **course}, falls))
    return parts


def _start(time: Duration, shape: BatchShape) -> Duration:
    """Return the time of the first batch at or after `time`. Rows become batches, and zero is the same in every unit."""
    return Duration(shape.batches(time), "ba") if time.unit == "sp" else time if time.value else START


def _text(duration: Duration, total: Duration) -> str:
    return f"{duration.resolve(total)} ({duration} of {total})" if duration.unit == "dur" else str(duration)


def _compare(
    first: PretrainConfig, second: PretrainConfig, before: list[_Part], now: list[_Part], overrides: Sequence[str]
) -> Difference | None:
    """Return the first difference between the phases, or between the schedules, of two runs."""
    shape = first.batch_shape
    ends = [_start(config.max_duration, shape) for config in (first, second)]
    for index, (old, new) in enumerate(zip_longest(before, now)):
        differing = next(_differing_keys(old, new, before, now, overrides), None)
        if differing is None:
            continue
        # A time in another unit may come before the part's own start.
        later = dict.fromkeys(part.start for part in (*before[index:], *now[index:]))
        times = [time for time in later if all(_may_reach(end, time, shape) for end in ends)]
        return Difference(min(_earliest(time, shape) for time in times), *differing, tuple(times)) if times else None
    return None


def _differing_keys(
    old: _Part | None, new: _Part | None, before: list[_Part], now: list[_Part], overrides: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the keys in which two parts differ, with both values. `before` and `now` are all parts of the two runs."""
    if old is None or new is None or old.start != new.start:
        key = now[-1].end[0] if new is None else new.start_key
        if not is_overridden(key, overrides):
            first = before[-1].end[1] if old is None else old.start_text
            yield key, first, now[-1].end[1] if new is None else new.start_text
    if old is not None and new is not None:
        for key in {**new.rule, **old.rule}:
            if old.rule.get(key) != new.rule.get(key) and not is_overridden(key, overrides):
                yield key, old.text(key), new.text(key)


def _earliest(time: Duration, shape: BatchShape) -> int:
    """Return the earliest batch that can begin at or after `time`."""
    return int(time.value) if time.unit == "ep" else shape.batches(time)


def _may_reach(end: Duration, time: Duration, shape: BatchShape) -> bool:
    """Return whether a run that ends at `end` may have a batch that begins at or after `time`."""
    if time.unit == end.unit:
        return time.value < end.value
    return end.unit != "ba" or _earliest(time, shape) < end.value
