"""Extract the text of an answer from the logits of a context's tokens, for question answering."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Span = tuple[float, int, int]
"""Score, negative first character and negative end of a span in the context, so that a larger tuple is a better span."""


def best_span(logits: np.ndarray, offsets: np.ndarray, longest_answer: int) -> Span:
    """Return the span with the highest sum of start and end logits in one window of a question's context.

    A span has at most `longest_answer` tokens and at least one character. The rules are those of Hugging Face's run_qa,
    except that all spans are compared, not only those of the twenty best starts and ends. Among spans with equal
    scores, the earliest start and then the shortest span is chosen. The score is -inf if there are no tokens.

    Args:
        logits: float [tokens, 2], the start and end logits of the context's tokens in this window.
        offsets: int [tokens, 2], each token's characters in the context, [first, end), which never decrease.

    Raises:
        ValueError: a logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("a logit is not finite")
    if not len(logits):
        return -math.inf, 0, 0
    # Row i of a banded matrix [tokens, longest] holds the ends i, i + 1, ... Padding beyond the window has the end character
    # 0 and is masked out, because such a span has no characters. fp64 keeps the rounding error of the sums small.
    ends = sliding_window_view(np.pad(logits[:, 1].astype(np.float64), (0, longest_answer - 1)), longest_answer)
    characters = sliding_window_view(np.pad(offsets[:, 1], (0, longest_answer - 1)), longest_answer)
    scores = np.where(characters > offsets[:, :1], logits[:, :1] + ends, -np.inf)
    # argmax returns the first of equal maxima, which is the earliest start, then the shortest span.
    first, length = divmod(int(scores.argmax()), longest_answer)
    return float(scores[first, length]), -int(offsets[first, 0]), -int(offsets[first + length, 1])


def best_answer(context: str, windows: Sequence[tuple[Span, float]]) -> tuple[str, float, float]:
    """Return the best answer to a question: its text, its score and the no-answer score.

    `windows` has, in any order, each window's best span in `context` and its null score, the sum of the start and end
    logits at the window's first position. Without tokens, the text is empty and its score -inf. The no-answer score, to
    be compared with a threshold, is the lowest null score among the windows, as in run_qa, minus the answer's score.

    Raises:
        ValueError: a null score is not finite.
    """
    spans, nulls = zip(*windows, strict=True)
    if not all(map(math.isfinite, nulls)):
        raise ValueError("a logit is not finite")
    score, first, end = max((-math.inf, 0, 0), *spans)
    return context[-first:-end], score, min(nulls) - score
