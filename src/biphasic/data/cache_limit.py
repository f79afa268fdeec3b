"""Check that a cache limit is large enough for the shards that one node reads at the same time."""

from __future__ import annotations

import math

from streaming import StreamingDataset

from biphasic.errors import UserError


def require_room(limit: int, dataset: StreamingDataset, workers: int) -> None:
    """Refuse a cache limit that makes Streaming delete shards between their download and their use.

    Streaming deletes the least recently used shard. If a node reads rows from more shards than the cache holds, each
    row needs its own download, until a read fails.

    Args:
        limit: value of `data.cache_limit`, in bytes.
        dataset: dataset that was opened without a limit.
        workers: number of loader processes per rank.

    Raises:
        UserError: the limit is too small. The message names the smallest sufficient limit.
    """
    largest = max(shard.get_max_size() for shard in dataset.shards)
    shards = shards_in_use(dataset, workers)
    indexes = sum(stream.get_index_size() for stream in dataset.streams)
    # Streaming itself requires space for four shards.
    smallest = indexes + max(shards, 4) * largest
    if limit < smallest:
        raise UserError(
            f"data.cache_limit: {limit:,}b is too small: a node reads rows of up to {shards:,} shards at a time, "
            f"the largest of {largest:,} bytes unpacked and packed; expected at least {smallest:,}b, or a smaller "
            f"data.predownload (now {dataset.predownload:,}) or data.shuffle_block_size"
        )


def shards_in_use(dataset: StreamingDataset, workers: int) -> int:
    """Return the maximum number of shards from which a node's loader processes read or download ahead at a time."""
    world, canonical = dataset._parallel_rank_world, dataset.num_canonical_nodes or 1
    assert dataset.predownload is not None and dataset.batch_size is not None
    processes = world.ranks_per_node * max(workers, 1)
    # Each process reads a batch, the rows ahead of it, and one more row.
    rows = processes * (dataset.batch_size + dataset.predownload + 1)
    local_canonical = max(canonical // world.num_nodes, 1)
    rows_per_shard = dataset.num_samples / dataset.num_shards
    spread = (dataset.shuffle_block_size or dataset.num_samples) if dataset.shuffle else 0
    # A node reads its canonical nodes in parallel, each from a different part of the dataset.
    in_parallel = local_canonical * (math.ceil((spread + rows / local_canonical) / rows_per_shard) + 1)
    return min(dataset.num_shards, rows, in_parallel)
