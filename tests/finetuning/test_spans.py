"""The best span against a search through all spans."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from biphasic.finetuning import question_answering as spans

SpanAnswer = tuple[str, float, float]
"""Text, score and no-answer score."""


@dataclass(frozen=True)
class ContextWindow:
    """The logits of a window."""

    start: np.ndarray
    end: np.ndarray
    offsets: np.ndarray
    null: float


def best_answer(context: str, windows: list[ContextWindow], longest: int) -> SpanAnswer:
    """Return the best answer of all windows, from each window's logits."""
    logits = [np.stack([window.start, window.end], axis=1) for window in windows]
    best = [spans.best_span(both, window.offsets, longest) for both, window in zip(logits, windows, strict=True)]
    return spans.best_answer(context, [(span, window.null) for span, window in zip(best, windows, strict=True)])


CONTEXT = "".join(chr(0x4E00 + position) for position in range(90))
"""Every character occurs once, so that a text tells where it stands."""


def all_spans(context: str, windows: list[ContextWindow], longest: int) -> SpanAnswer:
    best: tuple[float, int, int] | None = None
    for window in windows:
        for first in range(len(window.start)):
            for last in range(first, min(first + longest, len(window.end))):
                start, end = int(window.offsets[first, 0]), int(window.offsets[last, 1])
                span = (-(float(window.start[first]) + float(window.end[last])), start, end)
                if start < end and (best is None or span < best):
                    best = span
    null = min(window.null for window in windows)
    if best is None:
        return "", -math.inf, math.inf
    return context[best[1] : best[2]], -best[0], null + best[0]


def random_windows(generator: np.random.Generator) -> list[ContextWindow]:
    """Return overlapping windows of several lengths, some without tokens; some tokens share a character or have none."""
    cuts = np.sort(generator.choice(len(CONTEXT) + 1, size=int(generator.integers(2, 60)), replace=True))
    offsets = np.stack([cuts[:-1], cuts[1:]], axis=1)
    repeated = np.repeat(offsets, generator.choice([1, 1, 1, 3], size=len(offsets)), axis=0)
    windows = []
    for _ in range(int(generator.integers(1, 4))):
        first, last = np.sort(generator.integers(0, len(repeated) + 1, size=2))
        # Few different logits, so that many spans tie.
        start, end = generator.integers(-2, 3, size=(2, last - first)).astype(np.float32)
        windows.append(ContextWindow(start, end, repeated[first:last], float(generator.integers(-4, 5))))
    return windows


@pytest.mark.parametrize("longest", [1, 2, 5, 30, 500])
def test_best_of_all_spans(longest: int) -> None:
    generator = np.random.default_rng(longest)
    empty = 0
    for _ in range(300):
        windows = random_windows(generator)
        answer = best_answer(CONTEXT, windows, longest)
        assert answer == all_spans(CONTEXT, windows, longest)
        assert answer == best_answer(CONTEXT, windows[::-1], longest)
        empty += answer[0] == ""
    assert 0 < empty < 150


def test_distinct_logits() -> None:
    generator = np.random.default_rng(0)
    offsets = np.stack([np.arange(90), np.arange(90) + 1], axis=1)
    for _ in range(50):
        windows = [
            ContextWindow(
                *generator.normal(size=(2, 60)).astype(np.float32),
                offsets[first : first + 60],
                float(generator.normal()),
            )
            for first in (0, 30)
        ]
        assert best_answer(CONTEXT, windows, 30) == all_spans(CONTEXT, windows, 30)


def window_of(start: list[float], end: list[float], null: float = 0.0, first: int = 0) -> ContextWindow:
    places = np.arange(first, first + len(start))
    return ContextWindow(np.array(start), np.array(end), np.stack([places, places + 1], axis=1).reshape(-1, 2), null)


def test_by_hand() -> None:
    # The best end is before the best start, so they make no span.
    assert best_answer("abcd", [window_of([0, 1, 0, 9], [9, 0, 5, 0])], 30) == ("a", 9.0, -9.0)
    # At most 30 tokens: the 31st is one too far.
    context = "".join(chr(0x4E00 + place) for place in range(40))
    for last, length in ((29, 30), (30, 1)):
        ends = [0.0] * 40
        ends[last] = 5.0
        assert len(best_answer(context, [window_of([6.0] + [0.0] * 39, ends)], 30)[0]) == length
    # A span doesn't reach from one window into another.
    assert best_answer("abcd", [window_of([5, 0], [0, 0]), window_of([0, 0], [0, 7], first=2)], 30)[0] == "cd"


def test_ties_go_to_the_first_start_then_to_the_shortest() -> None:
    flat = window_of([1, 1, 1], [2, 2, 2], first=2)
    assert best_answer("abcdefgh", [flat], 30) == ("c", 3.0, -3.0)
    earlier, longer = window_of([1, 0], [0, 2], first=1), window_of([1, 0, 0], [0, 0, 2], first=1)
    for windows in ([flat, earlier, longer], [longer, earlier, flat]):
        assert best_answer("abcdefgh", windows, 30)[0] == "bc"


def test_null_score_is_the_lowest_of_the_windows() -> None:
    windows = [window_of([1], [1], null=4.0), window_of([0], [0], null=-1.0, first=1), window_of([], [], null=9.0)]
    assert best_answer("ab", windows, 30) == ("a", 2.0, -3.0)


def test_windows_without_context() -> None:
    empty = window_of([], [], null=-7.0)
    assert best_answer("ab", [empty], 30) == ("", -math.inf, math.inf)
    assert best_answer("", [empty, empty], 30) == ("", -math.inf, math.inf)
    assert best_answer("ab", [empty, window_of([0, 1], [0, 1]), empty], 30) == ("b", 2.0, -9.0)
    nothing = ContextWindow(np.array([5.0, 5.0]), np.array([5.0, 5.0]), np.array([[1, 1], [1, 1]]), 0.0)
    assert best_answer("ab", [nothing], 30)[1] == -math.inf


def test_scores_are_added_in_fp64() -> None:
    # In fp32 both sums are 2 ** 24, and the first would win.
    start, end = np.array([2.0**24, 2.0**24], np.float32), np.array([0.0, 1.0], np.float32)
    window = ContextWindow(start, np.array([0.0, 0.0], np.float32), np.array([[0, 1], [1, 2]]), 0.0)
    assert best_answer("ab", [window], 30)[0] == "a"
    assert best_answer("ab", [ContextWindow(start, end, window.offsets, 0.0)], 30) == (
        "ab",
        2.0**24 + 1,
        -(2.0**24) - 1,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused(value: float) -> None:
    window = window_of([1, 2], [1, 2])
    for broken in (
        ContextWindow(np.array([value, 0]), window.end, window.offsets, 0.0),
        ContextWindow(window.start, np.array([0, value]), window.offsets, 0.0),
        ContextWindow(window.start, window.end, window.offsets, value),
    ):
        with pytest.raises(ValueError, match="not finite"):
            best_answer("ab", [window, broken], 30)
