"""Group items up to a size limit, e.g. files into work units, and map items with threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped_ahead(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield the function's results in order, up to `threads` computed ahead. None is begun after an error."""
    running, pool = deque[Future[Result]](), ThreadPoolExecutor(threads)
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def groups_up_to(limit: float, items: Iterable[Item], size: Callable[[Item], float] = lambda _: 1) -> Iterator[list[Item]]:
    """Yield groups of consecutive items with a total size of at most `limit`. A larger item forms its own group."""
    group: list[Item] = []
    total = 0.0
    for item in items:
        total += (added := size(item))
        if group and total > limit:
            yield group
            group, total = [], added
        group.append(item)
    if group:
        yield group


def length_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of text indices, shortest first, of at most `tokens` tokens. A longer text has its own batch."""
    shortest_first = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return groups_up_to(tokens, shortest_first, lambda index: lengths[index])


def full_groups(limit: float, items: Iterable[Item], size: Callable[[Item], float]) -> list[list[Item]]:
    """Return groups of items, in any order, with a total size of at most `limit`: fewer groups than `groups_up_to`.

    First-fit decreasing: from the largest item to the smallest, each goes to the first group with enough room. An item
    larger than `limit` forms its own group.
    """
    groups: list[list[Item]] = []
    room: list[float] = []
    for item in sorted(items, key=size, reverse=True):
        place = next((number for number, left in enumerate(room) if size(item) <= left), len(groups))
        if place == len(groups):
            groups.append([])
            room.append(limit)
        groups[place].append(item)
        room[place] -= size(item)
    return groups
