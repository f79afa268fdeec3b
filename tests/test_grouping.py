from __future__ import annotations

from biphasic.grouping import groups_up_to


def test_groups_are_as_large_as_the_limit_allows() -> None:
    sizes = [3, 3, 4, 1, 12, 5, 5, 1]
    assert list(groups_up_to(10, sizes, lambda size: size)) == [[3, 3, 4], [1], [12], [5, 5], [1]]
    assert list(groups_up_to(2, "abcde")) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(groups_up_to(10, [])) == []
