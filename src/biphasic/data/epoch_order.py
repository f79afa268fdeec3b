"""The order of an epoch's rows: Streaming's (`py1e`), with each process finding its own rows by arithmetic.

Streaming itself arranges the rows of all processes of all nodes in arrays of 53 bytes a row, on each node.
"""

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.shuffle import get_shuffle
from streaming.base.world import World

Rows = NDArray[np.int64]
_AT_ONCE = 1 << 20


def shuffled_rows(dataset: StreamingDataset, epoch: int) -> Rows:
    """Return the ids of an epoch's rows, int64 [rows], those of the first canonical node first, each in its own order."""
    assert dataset.num_canonical_nodes is not None and dataset.shuffle_block_size is not None
    shards, drawn = dataset.samples_per_shard, None
    if any(stream.choose != rows for stream, rows in zip(dataset.streams, dataset.samples_per_stream, strict=True)):
        shards, drawn = dataset.resample_streams(epoch)
    nodes, seed = dataset.num_canonical_nodes, dataset.shuffle_seed
    order = get_shuffle(dataset.shuffle_algo, shards, nodes, seed, epoch, dataset.shuffle_block_size)
    return order if drawn is None else drawn[order]


def own_rows(rows: Rows, canonical_nodes: int, first: int, world: World, batch_size: int, batches: int) -> Rows:
    """Return the ids of the rows that a process reads, int64 [rows of its batches].

    An epoch takes a row from each canonical node in turn. It gives them to the nodes in turn, and those of a node to its
    ranks in turn. A rank's batches go to its processes in turn.

    Args:
        rows: those of the epoch, from `shuffled_rows`.
        canonical_nodes: the parts of `rows`, whose sizes differ by at most one.
        first: number of the epoch's rows, over all ranks, that come before the first one to read.
        world: the process's place among all.
        batch_size: rows in a rank's batch.
        batches: number of a rank's batches.
    """
    own = np.empty(len(range(world.worker_of_rank, batches, world.workers_per_rank)) * batch_size, np.int64)
    starts = np.arange(canonical_nodes + 1) * len(rows) // canonical_nodes
    for begin in range(0, len(own), _AT_ONCE):
        number = np.arange(begin, min(begin + _AT_ONCE, len(own)))
        batch = number // batch_size * world.workers_per_rank + world.worker_of_rank
        of_rank = batch * batch_size + number % batch_size
        place = first + (of_rank * world.ranks_per_node + world.rank_of_node) * world.num_nodes + world.node
        canonical = place % canonical_nodes
        # A canonical node with one row less than others gives its last one twice.
        own[number] = rows[np.minimum(starts[canonical] + place // canonical_nodes, starts[canonical + 1] - 1)]
    return own
