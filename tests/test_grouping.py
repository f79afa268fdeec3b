from __future__ import annotations

from biphasic.grouping import full_groups, groups_up_to


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
