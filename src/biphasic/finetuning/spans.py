"""Extractive question answering: from logits of the context's tokens to an answer's text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

LONGEST_ANSWER = 30
"""In tokens; what run_qa and the scripts before it take."""


@dataclass(frozen=True)
class Window:
    """What the model says of one stretch of a question's context; there may be no tokens in it."""

    start: np.ndarray
    """float [tokens]: the logit of the answer's first token, for the window's tokens of the context alone."""
    end: np.ndarray
    """float [tokens]: the logit of its last token."""
    offsets: np.ndarray
    """int [tokens, 2]: first character in the whole context, and the one after the last; neither ever falls."""
    null: float
    """Start and end logit of the window's first position, added: that no answer lies here."""


@dataclass(frozen=True)
class Answer:
    """A question's best answer, and how sure it is that there is none."""

    text: str
    """As it stands in the context; empty if no window has tokens."""
    start: int
    """Its first character in the context."""
    end: int
    """The character after its last."""
    score: float
    """Start logit plus end logit; -inf if no window has tokens."""
    no_answer: float
    """The null score minus `score`; compare it with a threshold. +inf if no window has tokens."""


def best_answer(context: str, windows: Sequence[Window], longest_answer: int = LONGEST_ANSWER) -> Answer:
    """The best span of all windows: the highest sum of a start logit and an end logit.

    A span begins at a token and ends at the same or a later one of the same window, has at most `longest_answer` tokens, and
    holds at least one character. The rules are those of Hugging Face's run_qa, but all spans are compared, not only those
    of the twenty best starts and ends. As there, the null score is the lowest of the windows': one window that is sure of
    its answer is enough.

    Args:
        context: the text that the offsets count in.
        windows: of one question, in any order; they may overlap.
        longest_answer: in tokens.

    Returns:
        Of equally good spans the one that starts first in the context, and of these the shortest.

    Raises:
        ValueError: there are no windows, a window's arrays differ in length, or a logit is not finite.
    """
    if not windows:
        raise ValueError("a question has at least one window")
    for window in windows:
        _require_fit(window)
    null = min(float(window.null) for window in windows)
    best = max((-math.inf, 0, 0), *(_best_span(window, longest_answer) for window in windows))
    score, start, end = best[0], -best[1], -best[2]
    return Answer(context[start:end], start, end, score, null - score)


def _best_span(window: Window, longest: int) -> tuple[float, int, int]:
    """Score, and first and last character with a minus, so that the larger tuple is the better span."""
    if not len(window.start):
        return -math.inf, 0, 0
    # Row i of a banded matrix [tokens, longest] holds the ends i, i + 1, ...; past the window's end there are zeros, and no
    # span that ends at character 0 has any.
    # In fp64, where the sum of two smaller floats loses next to nothing: what ties is a tie.
    ends = sliding_window_view(np.pad(window.end.astype(np.float64), (0, longest - 1)), longest)
    characters = sliding_window_view(np.pad(window.offsets[:, 1], (0, longest - 1)), longest)
    scores = np.where(characters > window.offsets[:, :1], window.start[:, None] + ends, -np.inf)
    # The first of the largest, row by row: the earliest start, then the shortest.
    first, more = divmod(int(scores.argmax()), longest)
    return float(scores[first, more]), -int(window.offsets[first, 0]), -int(window.offsets[first + more, 1])


def _require_fit(window: Window) -> None:
    tokens = len(window.start)
    if window.start.shape != (tokens,) or window.end.shape != (tokens,) or window.offsets.shape != (tokens, 2):
        shapes = f"{window.start.shape}, {window.end.shape}, {window.offsets.shape}"
        raise ValueError(f"start, end and offsets of a window don't fit each other: {shapes}")
    if not (math.isfinite(window.null) and np.isfinite(window.start).all() and np.isfinite(window.end).all()):
        raise ValueError("a logit is not finite")
