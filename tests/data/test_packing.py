from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

import biphasic
from biphasic.data.packing import (
    DocumentPacker,
    Row,
    StreamCutter,
    cut_position,
    document_number,
    mds_columns,
    padded,
    token_dtype,
    validation_end,
)


def pack(packer: DocumentPacker | StreamCutter, documents: Iterable[np.ndarray]) -> Iterator[Row]:
    for tokens in documents:
        yield from packer.add(tokens)
    yield from packer.finish()


def documents(seed: int) -> list[np.ndarray]:
    """Documents of random lengths; all tokens are different."""
    generator = np.random.default_rng(seed)
    count, longest = int(generator.integers(1, 300)), int(generator.choice([3, 20, 70, 400]))
    lengths = generator.integers(0, longest + 1, count)
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.uint32) for end, length in zip(ends, lengths, strict=True)]


def check_rows(rows: list[Row], sequence_length: int) -> None:
    for row in rows:
        assert row.lengths.dtype == np.uint32
        assert len(row.lengths)
        assert row.lengths.min() >= 1
        assert row.lengths.sum() == len(row.tokens) <= sequence_length


def tokens_of(rows: Iterable[Row]) -> list[int]:
    return [token for row in rows for token in row.tokens.tolist()]


@pytest.mark.parametrize("seed", range(40))
def test_packing_keeps_every_token_once_and_documents_apart(seed: int) -> None:
    texts = documents(seed)
    generator = np.random.default_rng((seed, 1))
    length, window = int(generator.choice([4, 16, 33, 64])), int(generator.choice([1, 7, 1000]))
    rows = list(pack(DocumentPacker(length, window), texts))
    check_rows(rows, length)
    assert Counter(tokens_of(rows)) == Counter(token for document in texts for token in document.tolist())
    segments = [segment.tolist() for row in rows for segment in np.split(row.tokens, np.cumsum(row.lengths)[:-1])]
    # A segment is a complete document, or a piece of one: full rows, then the rest.
    pieces = [document[at : at + length].tolist() for document in texts for at in range(0, len(document), length)]
    assert sorted(segments) == sorted(pieces)


@pytest.mark.parametrize("seed", range(40))
def test_cutting_keeps_every_token_once_in_order(seed: int) -> None:
    texts = documents(seed)
    length, shortest = [(16, 2), (64, 12), (33, 16)][seed % 3]
    rows = list(pack(StreamCutter(length, shortest, seed), texts))
    check_rows(rows, length)
    assert tokens_of(rows) == [token for document in texts for token in document.tolist()]
    for row in rows[:-1]:
        assert len(row.tokens) == length
        assert len(row.lengths) == 2
        assert shortest <= row.lengths.min()


def test_cuts_are_uniform_between_shortest_and_its_complement() -> None:
    cuts = np.array([cut_position(seed=1, row=row, sequence_length=64, shortest=12) for row in range(20_000)])
    counts = np.bincount(cuts, minlength=65)
    assert counts[:12].sum() == counts[53:].sum() == 0
    expected = 20_000 / 41
    assert abs(counts[12:53] - expected).max() < 5 * expected**0.5


def test_cuts_are_a_function_of_seed_and_row_alone() -> None:
    # Constants, so that a numpy version or a machine that cuts elsewhere is noticed.
    assert [cut_position(42, row, 2048, 12) for row in range(5)] == [1270, 1730, 1309, 2003, 1432]
    stream = list(pack(StreamCutter(64, 12, seed=9), [np.zeros(10 * 64, np.uint16)]))
    assert [row.lengths[0] for row in stream] == [cut_position(9, row, 64, 12) for row in range(10)]
    few, many = ([np.arange(n, dtype=np.uint32) for n in lengths] for lengths in ([300, 20], [1] * 320))
    assert [row.lengths.tolist() for row in pack(StreamCutter(32, 4, 7), few)] == [
        row.lengths.tolist() for row in pack(StreamCutter(32, 4, 7), many)
    ]
    assert cut_position(42, 0, 2048, 12) != cut_position(43, 0, 2048, 12)


def test_packing_is_deterministic() -> None:
    first, second = ([row.tokens.tolist() for row in pack(DocumentPacker(64, 20), documents(5))] for _ in range(2))
    assert first == second


def lognormal_lengths(count: int) -> list[int]:
    return (np.random.default_rng(0).lognormal(4, 1, count).astype(int) + 30).tolist()


def test_packing_fills_rows() -> None:
    """Documents of at least 30 tokens, so that not every gap can be filled; taking the longest that fits gives 98.6%."""
    lengths = lognormal_lengths(20_000)
    rows = list(pack(DocumentPacker(512, 1000), [np.zeros(length, np.uint16) for length in lengths]))
    assert sum(lengths) / (512 * len(rows)) > 0.995


def test_documents_wait_for_a_bounded_time() -> None:
    packer = DocumentPacker(512, 1000)
    waited = 0
    for number, length in enumerate(lognormal_lengths(20_000)):
        for row in packer.add(np.full(length, number, dtype=np.uint32)):
            waited = max(waited, number - int(row.tokens.min()))
    for row in packer.finish():
        waited = max(waited, 20_000 - int(row.tokens.min()))
    # Each row takes the document that has waited longest, and a few others: more than the window, not without bound.
    assert 1000 < waited < 5000


def test_packing_reads_no_more_than_its_window_ahead() -> None:
    read = 0

    def counted_documents() -> Iterable[np.ndarray]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield np.zeros(3, dtype=np.uint16)

    next(iter(pack(DocumentPacker(64, 10), counted_documents())))
    assert read == 11


def test_two_pieces_that_fill_the_space_are_better_than_the_longest() -> None:
    """The row of the oldest document has 6 positions left: 4 and 2 fill them, 5 and the 3 that wait don't."""
    packer = DocumentPacker(10, 4)
    texts = [np.full(length, length, np.uint16) for length in (4, 5, 3, 4, 2)]
    [row] = [row for tokens in texts for row in packer.add(tokens)]
    assert row.lengths.tolist() == [4, 4, 2] and row.tokens.tolist() == [4] * 8 + [2] * 2
    # After the last document: the longest first, then what fits.
    assert [row.lengths.tolist() for row in packer.finish()] == [[5, 3]]
    # Of equal lengths the oldest is taken.
    texts = [np.full(5, number, np.uint16) for number in range(3)]
    packer = DocumentPacker(10, 2)
    assert [row.tokens.tolist() for tokens in texts for row in packer.add(tokens)] == [[0] * 5 + [1] * 5]


def test_each_document_in_rows_of_its_own() -> None:
    packer = DocumentPacker(4, 0)
    for count, lengths in zip((4, 9, 8, 0), ([4], [4, 4, 1], [4, 4], []), strict=True):
        rows = packer.add(np.arange(count, dtype=np.uint16))
        check_rows(rows, 4)
        assert [row.lengths.tolist() for row in rows] == [[length] for length in lengths]
        assert tokens_of(rows) == list(range(sum(lengths)))
    assert packer.finish() == []


def test_columns_of_stored_rows() -> None:
    assert mds_columns(64, "uint16") == {"tokens": "ndarray:uint16:64", "lengths": "ndarray:uint32"}


def test_padding_follows_the_last_segment() -> None:
    row = Row(np.array([5, 6, 7], dtype=np.uint16), np.array([2, 1], dtype=np.uint32))
    stored = padded(row, 6, pad_id=9)
    assert stored["tokens"].tolist() == [5, 6, 7, 9, 9, 9]
    assert stored["tokens"].dtype == np.uint16
    assert stored["lengths"].tolist() == [2, 1]


def test_half_a_surrogate_pair_in_an_id_is_hashed_by_its_bytes() -> None:
    assert document_number("\ud83d") == int.from_bytes(blake2b(b"\xed\xa0\xbd", digest_size=8).digest(), "big")


def test_the_split_is_a_hash_of_the_id() -> None:
    ids = [f"<urn:uuid:{number}>" for number in range(20_000)]
    numbers = [document_number(id) for id in ids]
    validation = {number for number in numbers if number < validation_end(0.1)}
    assert 1800 < len(validation) < 2200
    assert validation < {number for number in numbers if number < validation_end(0.2)}
    assert not any(number < validation_end(0.0) for number in numbers)
    assert [document_number(str(number)) < validation_end(0.5) for number in range(8)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(("words", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (128_256, "uint32")])
def test_ids_are_stored_in_the_narrowest_type(words: int, dtype: str) -> None:
    assert token_dtype(words) == dtype


@pytest.mark.parametrize("length", [0, -3])
def test_rows_have_a_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"pack: expected a length of at least 1; got {length}"):
        biphasic.pack([[5, 6, 7]], length)


@pytest.mark.parametrize("document", [[5, -100, 7], [2**32], [2**70], [1.5, 2.0], [[1, 2], [3, 4]], ["5"], [True]])
def test_ids_are_whole_numbers_that_fit(document: Any) -> None:
    with pytest.raises(ValueError, match=r"pack: expected whole numbers from 0 to 2\*\*32 - 1 in document 1; got \["):
        biphasic.pack([[5], document], 4)


def test_an_empty_document_is_left_out() -> None:
    for document in ([], np.array([], np.int64)):
        [row] = biphasic.pack([document, [2**32 - 1, 0]], 2)
        assert row["input_ids"].tolist() == [2**32 - 1, 0]
