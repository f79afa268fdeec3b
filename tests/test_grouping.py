import time
from threading import Event

import pytest

from biphasic.grouping import full_groups, groups_up_to, mapped_ahead


def test_groups_are_as_large_as_the_limit_allows() -> None:
    sizes = [3, 3, 4, 1, 12, 5, 5, 1]
    assert list(groups_up_to(10, sizes, lambda size: size)) == [[3, 3, 4], [1], [12], [5, 5], [1]]
    assert list(groups_up_to(2, "abcde")) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(groups_up_to(10, [])) == []


def test_full_groups_are_fewer_than_consecutive_ones() -> None:
    sizes = [6, 6, 4, 4, 12, 1, 1, 3]
    groups = full_groups(10, sizes, lambda size: size)
    assert groups == [[12], [6, 4], [6, 4], [3, 1, 1]]
    assert len(groups) < len(list(groups_up_to(10, sizes, lambda size: size)))
    # Equal items keep their order, so that the groups don't depend on anything else.
    assert full_groups(2, ["b", "a", "c"], lambda _: 1) == [["b", "a"], ["c"]]
    assert full_groups(10, [], len) == []


def test_threads_work_ahead_of_the_caller_in_order() -> None:
    begun, may_end = list[int](), Event()

    def double(number: int) -> int:
        begun.append(number)
        assert number or may_end.wait(60)  # the first is the last to end
        return 2 * number

    results = mapped_ahead(double, range(100), 4)
    may_end.set()
    assert next(results) == 0
    time.sleep(0.1)
    assert len(begun) <= 5
    assert list(results) == [2 * number for number in range(1, 100)]
    assert list(mapped_ahead(double, [], 4)) == []


def test_after_an_error_no_further_item_is_begun() -> None:
    begun = list[int]()

    def fail(number: int) -> None:
        begun.append(number)
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        list(mapped_ahead(fail, range(1000), 4))
    time.sleep(0.1)
    assert len(begun) <= 5
