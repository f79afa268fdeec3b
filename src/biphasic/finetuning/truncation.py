"""Cut texts that are longer than the maximum length, count what is lost, and divide texts into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

import numpy as np

from biphasic.downstream.array_cache import Ragged
from biphasic.model.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class CutTexts:
    """How many texts are longer than `max_length` tokens, and what of them is not read."""

    max_length: int
    texts: int
    """Number of all texts."""
    cut: int
    tokens: int
    """Number of tokens that were left out."""
    answers: int = 0
    """Number of questions whose answer is in no input."""

    @classmethod
    def of(cls, examples: Mapping[str, Ragged], max_length: int) -> CutTexts:
        """Count from the examples' `lost`, a row `[tokens, answers]` of each text."""
        counts = examples["lost"].flat.reshape(-1, 2)
        cut, (tokens, answers) = int((counts[:, 0] > 0).sum()), counts.sum(0).tolist()
        return cls(max_length, len(counts), cut, tokens, answers)

    def describe(self) -> str:
        """Return a sentence for people, or an empty text if every text is read completely."""
        parts = []
        if self.cut:
            share = f"{self.cut:,} of {self.texts:,} texts are longer than {self.max_length:,} tokens"
            parts.append(f"{share} and are cut, by {self.tokens:,} tokens in all")
        if self.answers:
            parts.append(f"{self.answers:,} answers are in no input: their questions are trained as unanswerable")
        return "; ".join(parts)


def format_and_cut(
    tokenizer: TextTokenizer, template: str, rows: Sequence[Mapping[str, str]], max_length: int, title: str
) -> tuple[Ragged, Ragged]:
    """Return the token ids of a template filled with each row's texts, and `[tokens lost, 0]` of each row.

    Where the result is too long, tokens are removed from the end of the longest text first, as in transformers'
    `longest_first`, and the template's own text is kept.
    """
    pieces = [(literal, field) for literal, field, _, _ in Formatter().parse(template)]
    texts, lost = [], []
    formatted = ["".join(each + (row[field] if field else "") for each, field in pieces) for row in rows]
    room = max(max_length - len(tokenizer.prefix) - len(tokenizer.suffix), 0)
    at_end = len([field for _, field in pieces if field]) == 1 and template.endswith("}")
    tokens = tokenizer.tokenize_and_count(formatted, max_length, title)
    for row, text, (ids, cut) in zip(rows, formatted, tokens, strict=True):
        if cut and not at_end:
            spans, end = [], 0
            for literal, field in pieces:
                start = end + len(literal)
                end = start + len(row[field] if field else "")
                spans.append((start, end))
            [(whole, offsets)] = tokenizer.tokenize_with_offsets([text])
            ids = tokenizer.with_special_tokens(_without_longest(whole, offsets, spans, room), max_length)
        texts.append(np.array(ids, np.int32))
        lost.append([cut, 0])
    return Ragged.of(texts), Ragged.of(lost)


def _without_longest(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], room: int
) -> list[int]:
    """Return a text's tokens without those at the ends of its longest spans of characters."""
    ends = np.array([end for _, end in offsets])
    span_of = np.full(len(ids), -1)
    for number, (start, end) in enumerate(spans):
        span_of[(ends > start) & (ends <= end)] = number
    lengths = np.bincount(span_of[span_of >= 0], minlength=len(spans))
    kept = longest_first(lengths.tolist(), max(room - int((span_of < 0).sum()), 0))
    position = np.zeros(len(ids), int)  # of each token in its span
    for number in range(len(spans)):
        position[span_of == number] = np.arange(lengths[number])
    chosen = (span_of < 0) | (position < np.array([*kept, 0])[span_of])
    return [token for token, keep in zip(ids, chosen, strict=True) if keep]


def longest_first(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of each text are kept if all together may have `room` tokens and the longest are cut first."""
    kept = list(lengths)
    order = sorted(range(len(lengths)), key=lambda text: lengths[text])
    for number, text in enumerate(order):
        kept[text] = min(lengths[text], room // (len(order) - number))
        room -= kept[text]
    return kept


def windows(length: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens, [first, end), of overlapping windows over a text; one for an empty text."""
    step = size - overlap if overlap < size else max(size // 2, 1)
    starts = range(0, max(length - size, 0) + step, step)
    return [(start, min(start + size, length)) for start in starts]
