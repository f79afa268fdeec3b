"""The stored row, and how documents become rows. Pure functions of their input: no files, no state of the machine.

A row holds up to `sequence_length` token ids and the lengths of its segments; the rest is padding. Every token of every
document lands in exactly one row. `DocumentPacker` keeps documents apart and gives up a little space for it: of the
quickstart's docstrings (mean 321 tokens) it fills 99.3% of the positions of rows of 256, 99.6% of 512, 99.9% of 2,048.
`StreamCutter` fills every row and gives up the boundaries.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16 | np.uint32]


class Row(NamedTuple):
    """One row, not yet padded: `tokens` [n], and `lengths` uint32 [segments], which add up to n <= sequence_length."""

    tokens: Tokens
    lengths: NDArray[np.uint32]


class RowMaker(Protocol):
    """Takes documents one at a time and hands out the rows that are complete."""

    def add(self, tokens: Tokens) -> list[Row]:
        """Take a document's token ids [n]; returns the rows that this completes."""
        ...

    def finish(self) -> list[Row]:
        """The rows that are left once there are no more documents."""
        ...


def token_dtype(vocab_size: int) -> str:
    """The narrowest type that holds every id of a vocabulary of `vocab_size`: `uint16` or `uint32`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def columns(sequence_length: int, dtype: str) -> dict[str, str]:
    """The MDS columns of a stored row."""
    return {"tokens": f"ndarray:{dtype}:{sequence_length}", "lengths": "ndarray:uint32"}


def padded(row: Row, sequence_length: int, pad_id: int) -> dict[str, np.ndarray]:
    """The row as it is stored: `tokens` [sequence_length], with `pad_id` after the last segment, and `lengths`."""
    tokens = np.full(sequence_length, pad_id, dtype=row.tokens.dtype)
    tokens[: len(row.tokens)] = row.tokens
    return {"tokens": tokens, "lengths": row.lengths}


def document_number(document_id: str) -> int:
    """A document's id as a number of 64 bits, spread evenly. Two of a billion and a half ids share one with odds of 1:16."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def in_validation(document_id: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: a function of its id alone.

    A larger fraction's validation split contains a smaller one's.
    """
    return held_out(document_number(document_id), fraction)


def held_out(number: int, fraction: float) -> bool:
    """`in_validation` of a document by its `document_number`."""
    return number < fraction * 2**64


_LOOKED_AT = 32
"""Lengths that the packer considers for a place. Taking the longest that fits, without looking at what would fit next to
it, leaves twice as much unfilled."""


class _Piece:
    """A document, or the rest of one, that waits for a row."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: Tokens):
        self.tokens: Tokens | None = tokens


class DocumentPacker:
    """Rows of whole documents, each a segment: best fit among the `window` pieces that wait.

    A document longer than a row gives full rows of its own, and a rest. Each row starts with the piece that has waited
    longest, so that rows come out in about the order of the documents; the space left goes to the piece that fits best
    together with another one, again and again. At the end the longest piece goes first (best-fit decreasing), so that
    the last rows are as full as the others.
    """

    def __init__(self, sequence_length: int, window: int):
        self.sequence_length = sequence_length
        self.window = window
        self._by_age: deque[_Piece] = deque()
        self._by_length: list[deque[_Piece]] = [deque() for _ in range(sequence_length)]
        self._lengths: list[int] = []  # of the pieces that wait, sorted, each length once
        self._waiting = 0

    def add(self, tokens: Tokens) -> list[Row]:
        """Take a document's token ids [n]; returns the rows that this completes."""
        size = self.sequence_length
        whole = len(tokens) // size * size
        rows = [_row([tokens[at : at + size]]) for at in range(0, whole, size)]
        if whole < len(tokens):
            # A copy, so that the rest doesn't keep a long document in memory.
            self._wait(_Piece(tokens[whole:].copy() if whole else tokens), len(tokens) - whole)
        while self._waiting > self.window:
            rows.append(self._fill(self._take_oldest()))
        return rows

    def finish(self) -> list[Row]:
        """The rows of everything that still waits."""
        rows = []
        while self._waiting:
            rows.append(self._fill(self._take(self._lengths[-1])))
        self._by_age.clear()
        return rows

    def _wait(self, piece: _Piece, length: int) -> None:
        if not self._by_length[length]:
            insort(self._lengths, length)
        self._by_length[length].append(piece)
        self._by_age.append(piece)
        self._waiting += 1

    def _take_oldest(self) -> Tokens:
        while (tokens := self._by_age.popleft().tokens) is None:
            pass
        # The oldest of all is the oldest of its length.
        return self._take(len(tokens))

    def _take(self, length: int) -> Tokens:
        pieces = self._by_length[length]
        piece = pieces.popleft()
        if not pieces:
            del self._lengths[bisect_left(self._lengths, length)]
        self._waiting -= 1
        tokens, piece.tokens = piece.tokens, None
        assert tokens is not None
        return tokens

    def _fill(self, first: Tokens) -> Row:
        pieces, space = [first], self.sequence_length - len(first)
        while length := self._best_fit(space):
            pieces.append(self._take(length))
            space -= length
        return _row(pieces)

    def _best_fit(self, space: int) -> int:
        """The length that, with the best one after it, leaves least of `space`; 0 when nothing fits."""
        found, least = 0, space
        longest = bisect_right(self._lengths, space)
        for length in reversed(self._lengths[max(longest - _LOOKED_AT, 0) : longest]):
            after = bisect_right(self._lengths, space - length)
            left = space - length - (self._lengths[after - 1] if after else 0)
            if left < least:
                found, least = length, left
            if not left:
                break
        return found


class SingleRows:
    """Rows of one document each. A longer document gives several rows, or (`truncate`) its beginning alone."""

    def __init__(self, sequence_length: int, *, truncate: bool):
        self.sequence_length = sequence_length
        self.truncate = truncate

    def add(self, tokens: Tokens) -> list[Row]:
        """Take a document's token ids [n]; returns its rows."""
        size = self.sequence_length
        ends = size if self.truncate else len(tokens)
        return [_row([tokens[at : at + size]]) for at in range(0, min(ends, len(tokens)), size)]

    def finish(self) -> list[Row]:
        """Nothing waits."""
        return []


class StreamCutter:
    """Rows of one endless stream: documents joined, each row cut in two at a random place, no other boundary.

    EuroBERT's `--random_size` packing (paper.md, section 2): segment lengths are uniform between `shortest` and
    `sequence_length - shortest`, in pairs that fill a row. The cut depends on the seed and the row's number alone. The
    last row is as long as what is left.
    """

    def __init__(self, sequence_length: int, shortest: int, seed: int):
        self.sequence_length = sequence_length
        self.shortest = shortest
        self.seed = seed
        self._parts: list[Tokens] = []
        self._held = 0
        self._rows = 0

    def add(self, tokens: Tokens) -> list[Row]:
        """Take a document's token ids [n]; returns the rows that this completes."""
        rows, at = [], 0
        while at < len(tokens):
            part = tokens[at : at + self.sequence_length - self._held]
            self._parts.append(part)
            self._held += len(part)
            at += len(part)
            if self._held == self.sequence_length:
                rows.append(self._cut())
        return rows

    def finish(self) -> list[Row]:
        """The last row, if a part of one is left."""
        return [self._cut()] if self._held else []

    def _cut(self) -> Row:
        first = cut_at(self.seed, self._rows, self.sequence_length, self.shortest)
        lengths = [first, self._held - first] if self._held > first else [self._held]
        row = Row(np.concatenate(self._parts), np.array(lengths, dtype=np.uint32))
        self._parts, self._held, self._rows = [], 0, self._rows + 1
        return row


def cut_at(seed: int, row: int, sequence_length: int, shortest: int) -> int:
    """Length of a row's first segment: uniform in [shortest, sequence_length - shortest], the same on every machine."""
    # SeedSequence's words are fixed by numpy's compatibility promise; the distributions of a Generator are not.
    word = int(np.random.SeedSequence((seed, row)).generate_state(1, np.uint64)[0])
    return shortest + (word * (sequence_length - 2 * shortest + 1) >> 64)


def pack_documents(documents: Iterable[Tokens], sequence_length: int, window: int) -> Iterator[Row]:
    """Rows of whole documents; see `DocumentPacker`.

    Args:
        documents: token ids [n] each.
        sequence_length: positions in a row.
        window: pieces that may wait for a row they fit into.
    """
    return _rows(documents, DocumentPacker(sequence_length, window))


def cut_stream(documents: Iterable[Tokens], sequence_length: int, shortest: int, seed: int) -> Iterator[Row]:
    """Rows of the joined documents, cut at random; see `StreamCutter`.

    Args:
        documents: token ids [n] each.
        sequence_length: positions in a row.
        shortest: the shortest segment, at most half a row.
        seed: decides the cuts, together with the row's number.
    """
    return _rows(documents, StreamCutter(sequence_length, shortest, seed))


def _rows(documents: Iterable[Tokens], maker: RowMaker) -> Iterator[Row]:
    for tokens in documents:
        yield from maker.add(tokens)
    yield from maker.finish()


def _row(pieces: list[Tokens]) -> Row:
    return Row(np.concatenate(pieces), np.array([len(piece) for piece in pieces], dtype=np.uint32))
