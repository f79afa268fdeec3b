"""Whether a cache can hold what one node has in hand at the same time."""

from __future__ import annotations

import math

from streaming import StreamingDataset
from streaming.base.util import bytes_to_int

from biphasic.config.errors import UserError

_BLOCKWISE = ("py1e", "py1b", "py1br")
"""Shuffles that stay within `shuffle_block_size`; the others go over all rows of a canonical node, or all there are."""


def require_room(limit: str, dataset: StreamingDataset, workers: int) -> None:
    """Refuse a cache that drops shards between their download and their use.

    Streaming drops the shard that was not touched for longest. When the rows that a node has in hand lie in more shards
    than the cache holds, each row needs a download of its own, until a read fails.

    Args:
        limit: `data.cache_limit`.
        dataset: opened without a limit.
        workers: loader processes of a rank.

    Raises:
        UserError: the limit is too small, or can't be read; with the smallest one that will do.
    """
    try:
        given = bytes_to_int(limit)
    except ValueError:
        raise UserError(f"data.cache_limit: expected a size such as 200gb; got {limit!r}") from None
    largest = max(shard.get_max_size() for shard in dataset.shards)
    needed = shards_in_hand(dataset, workers)
    indexes = sum(stream.get_index_size() for stream in dataset.streams)
    # Streaming itself wants room for four.
    smallest = indexes + max(needed, 4) * largest
    if given < smallest:
        raise UserError(
            f"data.cache_limit: {limit} is too small: the rows that a node has in hand lie in up to {needed:,} shards, the "
            f"largest of {largest:,} bytes unpacked and packed; expected at least {smallest:,}b, or a smaller "
            f"data.predownload (now {dataset.predownload:,}) or data.shuffle_block_size"
        )


def shards_in_hand(dataset: StreamingDataset, workers: int) -> int:
    """In how many shards the rows may lie that one node's loader processes are reading or fetching ahead."""
    world, canonical = dataset._parallel_rank_world, dataset.num_canonical_nodes or 1
    assert dataset.predownload is not None and dataset.batch_size is not None
    processes = world.ranks_per_node * max(workers, 1)
    # Each has a batch in hand, its rows ahead, and one more that it is just fetching.
    rows = processes * (dataset.batch_size + dataset.predownload + 1)
    here = max(canonical // world.num_nodes, 1)
    in_shard = dataset.num_samples / dataset.num_shards
    spread = dataset.num_samples
    if not dataset.shuffle:
        spread = 0
    elif dataset.shuffle_algo in _BLOCKWISE and dataset.shuffle_block_size is not None:
        spread = dataset.shuffle_block_size
    # A node reads its canonical nodes side by side, each from a place of its own.
    side_by_side = here * (math.ceil((spread + rows / here) / in_shard) + 1)
    return min(dataset.num_shards, rows, side_by_side)
