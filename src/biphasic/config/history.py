"""Compare the histories of two pretraining runs: from which batch on they train differently, and in which key.

Keys such as the model, the data and the seed affect every batch. The phases, and the parts of the schedule (warmup,
constant rate, decay), follow each other, and each determines its own batches. So two runs are equal up to the first phase
or part whose start or settings differ. This decides which batches the runs of a study share, and what a restart may change.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from biphasic.config.base import flatten, within
from biphasic.config.phase_inputs import PhaseInputs, phase_key
from biphasic.config.phases import Phase
from biphasic.config.pretrain import PretrainConfig
from biphasic.durations import BatchShapes, Duration, TrainingProgress
from biphasic.timeline import START, decay_start, resolve_phases

_PATHS = {"local", "remote"}
_INPUTS = {"data", "global_batch_size", "model"}
"""Keys of phases that `_inputs` compares."""
_NOT_COMPARED_AS_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("run_name", "output", "start_from", "microbatch_size", "evaluation", "checkpoint"), True),
    **dict.fromkeys(("parallelism", "compute", "logging"), True),
    "tokenizer": True,  # a path: its hash is compared with the data's
    "optimizer": {"lr", "max_skipped_batches"},  # `_rates` compares lr
    "data": {
        **dict.fromkeys(("folder", "cache", "validation", "predownload"), True),
        **dict.fromkeys(("cache_limit", "num_workers"), True),
        # Training data is compared by the hash of its index.
        "train": _PATHS,
        "mix": {"__all__": _PATHS},
    },
    # Compared by `_phases` and `_rates`.
    **dict.fromkeys(("max_duration", "objective", "schedule"), True),
}
"""Keys and sections that a restart may change, and those that `_phases` and `_rates` compare batch by batch."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two histories: a key, with its value in either as text."""

    batch: int
    """First batch that is trained differently, counted from 0; the earliest possible one if it depends on the data's
    padding or on the length of an epoch."""
    key: str
    first: str
    second: str
    times: tuple[Duration, ...]
    """The histories are equal for batches that begin before all of these times."""

    def is_past(self, last_batch: TrainingProgress) -> bool:
        """Return whether a run whose last batch began at `last_batch` may already have trained differently."""
        return any(last_batch.reached(time) for time in self.times)


def first_difference(first: History, second: History, overrides: Sequence[str] = ()) -> Difference | None:
    """Return the first batch that two runs train differently, and a key that differs.

    A different constant key is a difference at batch 0. Keys that don't affect the weights, such as paths, are ignored,
    and so are those in `overrides` (`checkpoint.resume_overrides`). Only batches that both runs have are compared: None
    means that the shorter history is the beginning of the longer one.

    Tokens in a batch depend on padding, and batches in an epoch on the data. So times in `tok` or `ep` differ from any
    time in another unit, and `batch` is then the earliest possible one.
    """
    if constants := _constant_differences(first, second, overrides):
        return constants[0]
    compared = (_compare_parts(first, second, *parts, overrides) for parts in zip(first.parts, second.parts, strict=True))
    differences = sorted(filter(None, compared), key=lambda difference: difference.batch)
    if not differences:
        return None
    # With times in different units, the other difference may come first.
    return replace(differences[0], times=tuple(time for difference in differences for time in difference.times))


def compare_pasts(
    first: PretrainConfig, second: PretrainConfig, last_batch: TrainingProgress, overrides: Sequence[str] = ()
) -> list[Difference]:
    """Return the differences in batches up to the one that began at `last_batch`: all constant keys, or one other key."""
    histories = history_of(first), history_of(second)
    found = _constant_differences(*histories, overrides) or [first_difference(*histories, overrides)]
    return [difference for difference in found if difference is not None and difference.is_past(last_batch)]


def _constant_differences(first: History, second: History, overrides: Sequence[str]) -> list[Difference]:
    """Return the differing keys that affect every batch, in alphabetical order."""
    before, now = first.constants, second.constants
    return [
        Difference(0, key, *(repr(each[key]) if key in each else "nothing" for each in (before, now)), times=(START,))
        for key in sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if not is_overridden(key, overrides)
    ]


def is_overridden(key: str, overrides: Sequence[str]) -> bool:
    """Return whether a key, or a section that contains it, is one of `overrides`."""
    return any(within(key, name) for name in overrides)


@dataclass(frozen=True)
class _Part:
    """A phase, or a part of the schedule. It begins at `start`, in batches, tokens or epochs."""

    start: Duration
    rule: dict[str, str]
    """What determines its start and its batches, by key; first the key of its start."""
    written: dict[str, Duration]
    """Times as the YAML writes them, for messages."""

    def text(self, key: str, total: Duration) -> str:
        absent = "the end" if key.endswith(".until") else "no decay" if key == "schedule.decay" else "nothing"
        value: Any = self.written.get(key, self.rule.get(key, absent))
        is_share = isinstance(value, Duration) and value.unit == "dur"
        return f"{value.resolve(total)} ({value} of {total})" if is_share else str(value)


_NO_PART = _Part(START, {}, {})


class History(NamedTuple):
    """What decides a run's batches: constant keys, the parts of phases and of the schedule, and its end.

    `end` is in the YAML's unit, `last` in batches, tokens or epochs.
    """

    constants: dict[str, Any]
    parts: tuple[list[_Part], list[_Part]]
    end: Duration
    last: Duration
    shapes: BatchShapes


def history_of(config: PretrainConfig) -> History:
    """Return the history of a checked configuration."""
    constants = flatten(config.model_dump(mode="json", exclude=_NOT_COMPARED_AS_CONSTANTS, exclude_none=True))
    end, parts = config.max_duration, (_phases(config), _rates(config))
    return History(dict(constants), parts, end, _first_batch(end, config), config.batch_shapes)


def _phases(config: PretrainConfig) -> list[_Part]:
    parts, end, inputs = list[_Part](), config.max_duration, config.inputs
    for span in resolve_phases(config.objective.phases, end):
        phase, key, start = span.phase, f"objective.phases.{span.index}", _first_batch(span.start, config)
        rule, written = dict[str, str](), dict[str, Duration]()
        if span.index:
            before, switch = config.objective.phases[span.index - 1], f"objective.phases.{span.index - 1}.until"
            rule[switch], written[switch] = str(start), before.until or end
        rule[f"{key}.name"] = phase.name
        if hasattr(phase, "masking_ratio"):
            objective = phase.objective
            changes = objective.predicted_share(0.0) != objective.predicted_share(1.0)
            rule[f"{key}.masking_ratio"] = f"{phase.masking_ratio}" + f" at {span.end}" * changes
        rule |= _inputs(config.objective.phases[: span.index + 1], inputs[span.index], key)
        # Compare every other key of a phase, including keys that are added to the schema later.
        excluded = {"name", "until", "masking_ratio", *_INPUTS, *([] if span.index else ["reset_optimizer"])}
        others = phase.model_dump(mode="json", exclude=excluded)
        rule |= {f"{key}.{name}": json.dumps(value).strip('"') for name, value in flatten(others)}
        parts.append(_Part(start, rule, written))
    return parts


def _inputs(phases: Sequence[Phase], inputs: PhaseInputs, key: str) -> dict[str, str]:
    """Return what the last phase reads, by key, as far as it or a phase before it names it."""
    rule = {}
    if any(phase.global_batch_size for phase in phases):
        rule[f"{key}.global_batch_size"] = str(inputs.rows)
    if inputs.rope_theta is not None:
        rule[f"{key}.model.rope_theta"] = str(inputs.rope_theta)
    if any(phase.data for phase in phases):
        data = inputs.data.model_dump(mode="json", include={"train", "mix", "epoch_rows", "sequence_length"})
        rule |= {f"{key}.data.{name}": str(value) for name, value in flatten(data) if value is not None}
    return rule


def phase_paths(config: PretrainConfig) -> list[str]:
    """Return the keys of the paths of phases' data, which may change if the data's index stays the same."""
    return [
        f"{phase_key(index)}.{stream}.{path}"
        for index, inputs in enumerate(config.inputs)
        for stream in inputs.data.streams
        for path in _PATHS
    ]


def _rates(config: PretrainConfig) -> list[_Part]:
    """Return the warmup, constant part and decay of the learning rate."""
    schedule, end, rate = config.schedule, config.max_duration, {"optimizer.lr": repr(config.optimizer.lr)}
    warmup, decay = schedule.warmup.resolve(end), decay_start(schedule, end)
    rule = {**rate, "schedule.warmup": str(warmup if warmup.value else START)}
    written = {"schedule.warmup": schedule.warmup}
    parts = [_Part(START, rule, written), _Part(_first_batch(warmup, config), rule, written)]
    if decay != end:
        course = {"schedule.decay": f"from {decay} to {end}", "schedule.decay_shape": schedule.decay_shape}
        course["schedule.final_lr"] = repr(schedule.final_lr)
        # The first batch of the decay still has the full learning rate.
        falls = _first_batch(Duration(decay.value + 1, decay.unit), config)
        parts.append(_Part(falls, {**course, **rate}, {}))
    return parts


def _first_batch(time: Duration, config: PretrainConfig) -> Duration:
    """Return when the first batch at or after `time` begins. Rows become batches; zero is the same in every unit."""
    return Duration(config.batch_shapes.batches(time), "ba") if time.unit == "sp" else time if time.value else START


def _compare_parts(
    first: History, second: History, before: list[_Part], now: list[_Part], overrides: Sequence[str]
) -> Difference | None:
    """Return the first difference between the phases or the schedules of two runs."""
    shapes, ends = (first.shapes, second.shapes), (first.last, second.last)
    for index, (old, new) in enumerate(zip_longest(before, now, fillvalue=_NO_PART)):
        keys = [key for key in {**new.rule, **old.rule} if old.rule.get(key) != new.rule.get(key)]
        keys = keys[:1] if _NO_PART in (old, new) else keys
        if key := next((key for key in keys if not is_overridden(key, overrides)), None):
            # A later time in another unit may come before the part's own start.
            later = dict.fromkeys(part.start for part in (*before[index:], *now[index:]))
            reached = [all(map(_may_reach, ends, [time, time], shapes)) for time in later]
            times = tuple(itertools.compress(later, reached))
            batches = [_earliest(time, shape) for time in times for shape in shapes]
            texts = old.text(key, first.end), new.text(key, second.end)
            return Difference(min(batches), key, *texts, times) if times else None
    return None


def _earliest(time: Duration, shape: BatchShapes) -> int:
    """Return the earliest batch that can begin at or after `time`."""
    return int(time.value) if time.unit == "ep" else shape.batches(time)


def _may_reach(end: Duration, time: Duration, shape: BatchShapes) -> bool:
    """Return whether a run that ends at `end` may have a batch that begins at or after `time`."""
    if time.unit == end.unit:
        return time.value < end.value
    return end.unit != "ba" or _earliest(time, shape) < end.value
