"""Extract the text of an answer from the logits of a context's tokens, for question answering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


@dataclass(frozen=True)
class ContextWindow:
    """The model's output for one window of a question's context, which may have no tokens."""

    start: np.ndarray
    """float [tokens]: logits of being the answer's first token, for the context's tokens in this window."""
    end: np.ndarray
    """float [tokens]: logits of being the answer's last token."""
    offsets: np.ndarray
    """int [tokens, 2]: each token's first character in the context and the one after its last; neither ever decreases."""
    null: float
    """Sum of the start and end logits at the window's first position: the score for no answer in this window."""


@dataclass(frozen=True)
class SpanAnswer:
    """The best answer to a question, and the score for no answer."""

    text: str
    """The answer as in the context; empty if no window has tokens."""
    score: float
    """Start logit plus end logit; -inf if no window has tokens."""
    no_answer: float
    """The null score minus `score`, to compare with a threshold; +inf if no window has tokens."""


def best_answer(context: str, windows: Sequence[ContextWindow], longest_answer: int) -> SpanAnswer:
    """Return the span with the highest sum of start and end logits over all windows.

    A span begins and ends in the same window, has at most `longest_answer` tokens and at least one character. The rules are
    those of Hugging Face's run_qa, except that all spans are compared, not only those of the twenty best starts and ends.
    As in run_qa, the null score is the lowest among the windows.

    Args:
        context: the text that the offsets refer to.
        windows: the windows of one question, at least one, in any order; they may overlap.
        longest_answer: the maximum number of tokens in an answer.

    Returns:
        The best answer. Among spans with equal scores, the one that starts first in the context, then the shortest.

    Raises:
        ValueError: a logit is not finite.
    """
    for window in windows:
        if not (math.isfinite(window.null) and np.isfinite(window.start).all() and np.isfinite(window.end).all()):
            raise ValueError("a logit is not finite")
    null = min(float(window.null) for window in windows)
    score, first, last = max((-math.inf, 0, 0), *(_best_span(window, longest_answer) for window in windows))
    start, end = -first, -last
    return SpanAnswer(context[start:end], score, null - score)


def _best_span(window: ContextWindow, longest: int) -> tuple[float, int, int]:
    """Return the best span's score, negative first and negative last character, so that a larger tuple is a better span."""
    if not len(window.start):
        return -math.inf, 0, 0
    # Row i of a banded matrix [tokens, longest] holds the ends i, i + 1, ... Padding beyond the window has the end character
    # 0 and is masked out, because such a span has no characters. fp64 keeps the rounding error of the sums small.
    ends = sliding_window_view(np.pad(window.end.astype(np.float64), (0, longest - 1)), longest)
    characters = sliding_window_view(np.pad(window.offsets[:, 1], (0, longest - 1)), longest)
    scores = np.where(characters > window.offsets[:, :1], window.start[:, None] + ends, -np.inf)
    # argmax returns the first of equal maxima, which is the earliest start, then the shortest span.
    first, length = divmod(int(scores.argmax()), longest)
    return float(scores[first, length]), -int(window.offsets[first, 0]), -int(window.offsets[first + length, 1])
