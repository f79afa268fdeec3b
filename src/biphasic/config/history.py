"""Compare the histories of two pretraining runs: from which batch on, and in which key, they train differently.

A run is the history of its batches. The phases and the schedule decide each batch's objective and learning rate
(`config.timeline`); the other keys that affect the weights hold for every batch. What a restart may change, where a run may
start from another run's checkpoint, and which batches the runs of a study share all follow from `first_difference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.pieces import BATCHES, BEGINNING, TOKENS, Piece, Time, clock_time, objective_pieces, rate_pieces
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import START, BatchShape

_NO_EFFECT = (
    "run_name",
    "output",
    "start_from",
    "tokenizer",  # a path; the tokenizer's hash is compared with the data's
    "microbatch_size",
    "evaluation",
    "checkpoint",
    "parallelism",
    "compute",
    "logging",
    "optimizer.max_skipped_batches",
    "data.folder",
    "data.cache",
    "data.validation",
    "data.predownload",
    "data.cache_limit",
    "data.download_retry",
    "data.download_timeout",
    "data.num_workers",
    "data.check_hashes",
)
"""Keys and sections that don't affect the weights."""
_STREAM_PATHS = ("local", "remote")
"""Keys of a training stream that may differ, because its data is compared by the hash of its index."""
_TIMED = ("max_duration", "objective", "optimizer.lr", "schedule")
"""Keys and sections whose effect depends on the batch. They are compared batch by batch."""
_CHANGING = frozenset(
    ("masking_ratio", "optimizer.lr", "schedule.warmup", "schedule.decay", "schedule.decay_shape", "schedule.final_lr")
)
"""Fields that only affect the value of a piece, which may be equal for some batches although a field differs."""
_COMPARED_TOKENS = 1000
"""Number of times in tokens at which two functions are compared; a whole run has too many."""


@dataclass(frozen=True)
class Difference:
    """Where two histories part.

    Attributes:
        batch: first batch that is trained differently, counted from 0. If it depends on the data's padding or on the length
            of an epoch, this is the earliest possible batch.
        key: the key that differs, as in the second configuration.
        first: value of the key in the first configuration, as text.
        second: the same of the second configuration.
        times: the histories are equal for batches that begin before all of these times, which are in the configurations'
            units.
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

    Phases, masking ratios with their ramps, resets of the optimizer and learning rates are compared batch by batch. The
    other keys that affect the weights are compared once: a difference there is at batch 0. Keys that don't affect the
    weights, such as paths and the number of ranks, are ignored. The lengths of the runs are not a difference in themselves:
    only batches that both runs have are compared.

    Batches and rows are compared exactly. How many tokens a batch has depends on its padding, and how many batches an epoch
    has depends on the data. So times in `tok` are compared exactly with each other, and so are times in `ep`, but a time in
    `tok` or `ep` differs from any time in another unit. `Difference.batch` is then the earliest possible batch: a batch has
    at most `BatchShape`'s tokens, and an epoch at least one batch.

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
    differences = [
        *_compare(first, second, objective_pieces(first), objective_pieces(second), overrides),
        *_compare(first, second, rate_pieces(first), rate_pieces(second), overrides),
    ]
    if not differences:
        return None
    earliest = min(differences, key=lambda difference: difference.batch)
    # On different clocks the other difference may come first.
    return replace(earliest, times=tuple(time for difference in differences for time in difference.times))


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
    values = _flatten(config.model_dump(mode="json"), "")
    return {key: value for key, value in values.items() if not is_overridden(key, (*_NO_EFFECT, *_TIMED)) and
            not (key.startswith(("data.train.", "data.mix.")) and key.rpartition(".")[2] in _STREAM_PATHS)}  # fmt: skip


def _flatten(value: Any, key: str) -> dict[str, Any]:
    """Return values by dotted key. Keys with the value None are left out."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        children = (_flatten(child, f"{key}.{name}" if key else str(name)) for name, child in items)
        return {name: leaf for child in children for name, leaf in child.items()}
    return {} if value is None else {key: value}


@dataclass(frozen=True)
class _Overlap:
    """A stretch of time in which each of two runs is in one piece.

    Attributes:
        pieces: the runs' pieces.
        begin: whether each piece begins where the stretch begins.
        start: when the stretch begins.
        nexts: the pieces that follow. The stretch ends where the first of them begins.
    """

    pieces: tuple[Piece, Piece]
    begin: tuple[bool, bool]
    start: Time
    nexts: list[Piece]

    @property
    def resets_differ(self) -> bool:
        """Whether one run clears its optimizer state where the stretch begins, and the other doesn't."""
        first, second = (piece.resets and begins for piece, begins in zip(self.pieces, self.begin, strict=True))
        return first != second

    @property
    def differing_fields(self) -> list[str]:
        """Names of the fields in which the pieces differ."""
        first, second = (piece.fields for piece in self.pieces)
        return [name for name in {**second, **first} if first.get(name) != second.get(name)]


def _overlaps(first: list[Piece], second: list[Piece]) -> Iterator[_Overlap]:
    """Yield the overlaps of two runs' pieces, until the next two boundaries are on different clocks."""
    i = j = 0
    start, begin = BEGINNING, (True, True)
    while True:
        nexts = [*first[i + 1 : i + 2], *second[j + 1 : j + 2]]
        yield _Overlap((first[i], second[j]), begin, start, nexts)
        if not nexts or nexts[0].start.clock != nexts[-1].start.clock:
            return
        start = min((piece.start for piece in nexts), key=lambda time: time.value)
        begin = (any(piece.start == start for piece in first[i + 1 : i + 2]),
                 any(piece.start == start for piece in second[j + 1 : j + 2]))  # fmt: skip
        i, j = i + begin[0], j + begin[1]


def _compare(
    first_run: PretrainConfig,
    second_run: PretrainConfig,
    first: list[Piece],
    second: list[Piece],
    overrides: Sequence[str],
) -> Iterator[Difference]:
    """Yield the first difference between two runs' pieces, if both runs train that batch."""
    shape = first_run.batch_shape
    ends = [clock_time(run.max_duration, shape) for run in (first_run, second_run)]

    def is_trained(time: Time) -> bool:
        return not any(end.is_certainly_reached(time, shape) for end in ends)

    def difference(key: str, texts: tuple[str, str], times: list[Time]) -> Difference:
        batch = min(time.first_batch(shape) for time in times)
        return Difference(batch, key, *texts, tuple(Duration(time.value, time.clock) for time in times))

    overlap = None
    for overlap in _overlaps(first, second):
        key, texts = _differing_key(overlap, overrides)
        if key is None:
            continue
        time = overlap.start if overrides else _first_differing_time(overlap, ends, shape)
        if time is not None and is_trained(time):
            # The stretch may end before this time if its end is on another clock, and the pieces that follow differ.
            ends_before = [
                piece.start for piece in overlap.nexts if time != overlap.start and piece.start.clock != time.clock
            ]
            yield difference(key, texts, [time, *filter(is_trained, ends_before)])
            return
    assert overlap is not None
    # The order of the next two boundaries is unknown.
    times = [piece.start for piece in overlap.nexts if is_trained(piece.start)]
    if len(overlap.nexts) == 2 and times and not is_overridden(overlap.nexts[1].start_key, overrides):
        texts = tuple(piece.texts[piece.start_key] for piece in overlap.nexts)
        yield difference(overlap.nexts[1].start_key, (texts[0], texts[1]), times)


def _differing_key(overlap: _Overlap, overrides: Sequence[str]) -> tuple[str | None, tuple[str, str]]:
    """Return the key in which an overlap's pieces differ, or None, and its values."""
    first, second = overlap.pieces
    names = [*overlap.differing_fields, *(["reset_optimizer"] if overlap.resets_differ else [])]
    names = [name for name in names if not is_overridden(second.prefix + name, overrides)]
    if not names:
        return None, ("", "")
    if overlap.begin[0] != overlap.begin[1]:
        keys = [piece.boundary(begins) for piece, begins in zip(overlap.pieces, overlap.begin, strict=True)]
        if is_overridden(keys[1], overrides):
            return None, ("", "")
        return keys[1], (first.texts[keys[0]], second.texts[keys[1]])
    key = second.prefix + names[0]
    return key, (first.texts.get(first.prefix + names[0], "nothing"), second.texts.get(key, "nothing"))


def _first_differing_time(overlap: _Overlap, ends: list[Time], shape: BatchShape) -> Time | None:
    """Return when the values of two differing pieces first differ; None if they don't.

    Functions of batches are evaluated batch by batch. Functions of tokens are evaluated at the first `_COMPARED_TOKENS`
    times, since a batch can begin at any of them; if they are equal there, they may differ from the next time on. Where the
    values can't be compared, the overlap's start is returned.
    """
    first, second = overlap.pieces
    start, clocks = overlap.start, {piece.clock for piece in overlap.pieces if piece.clock is not None}
    if not clocks or overlap.resets_differ or not _CHANGING.issuperset(overlap.differing_fields):
        return start
    if start.value and clocks != {start.clock}:
        return start
    if len(clocks) > 1:
        zero = Elapsed(0, 0, 0, 0)
        return start if first.value(zero) != second.value(zero) else Time(BATCHES, 1)
    clock = clocks.pop()
    bounds = [time.value for time in (*ends, *(piece.start for piece in overlap.nexts)) if time.clock == clock]
    if not bounds:
        return start
    stop = min(bounds)
    compared = min(stop, start.value + _COMPARED_TOKENS) if clock == TOKENS else stop
    for value in range(start.value, compared):
        elapsed = Time(clock, value).elapsed(shape)
        if first.value(elapsed) != second.value(elapsed):
            return Time(clock, value)
    return Time(clock, compared) if compared < stop else None
