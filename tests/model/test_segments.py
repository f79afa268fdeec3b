"""Groups of texts of similar length."""

from biphasic.grouping import length_batches
from biphasic.model.segments import padding_groups


def test_padding_groups_have_little_padding() -> None:
    lengths = [3, 100, 5, 98, 4, 97, 50, 3, 51, 3, 3, 2, 99, 96]
    groups = padding_groups(lengths, exponent=1, extra=100)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    room = sum(len(group) * max(lengths[index] for index in group) for group in groups)
    assert room < 1.35 * sum(lengths)
    assert len(groups) <= 4
    assert padding_groups([7], exponent=1, extra=0) == [[0]]
    assert padding_groups([7, 7, 6], exponent=2, extra=0) == [[0, 1, 2]]
    assert padding_groups([7, 7, 4], exponent=2, extra=0) == [[0, 1], [2]]
    assert padding_groups([7, 7, 4], exponent=2, extra=33) == [[0, 1, 2]]


def test_length_batches_hold_at_most_their_tokens() -> None:
    lengths = [5, 1, 9, 30, 2, 2]
    batches = list(length_batches(lengths, 10))
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(sum(lengths[index] for index in batch) <= 10 or len(batch) == 1 for batch in batches)
    assert list(length_batches([], 10)) == []
