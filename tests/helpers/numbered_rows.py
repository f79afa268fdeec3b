"""Datasets whose rows hold their number."""

from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter
from streaming.base.world import World

from biphasic.config.data import DataConfig
from biphasic.data.epoch_order import own_rows, shuffled_rows
from biphasic.data.streaming import build_loader
from helpers.tiny import LENGTH

BATCH = 8


def write_numbered(folder: Path, rows: int, *, in_shard: int = 20, compression: str | None = "zstd") -> Path:
    """Rows that hold their number, `in_shard` of them in a shard."""
    columns = {"tokens": f"ndarray:uint16:{LENGTH}", "lengths": "ndarray:uint32"}
    # A row's bytes, and what the format adds to them.
    size = (2 * LENGTH + 4 + 12) * in_shard + 200
    noise = np.random.default_rng(0)
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], compression=compression, size_limit=size) as out:
        for number in range(rows):
            tokens = noise.integers(0, 1 << 16, LENGTH, dtype=np.uint16)
            tokens[0] = number
            out.write({"tokens": tokens, "lengths": np.array([LENGTH], np.uint32)})
    return folder


def data(folder: Path | str, **keys: Any) -> DataConfig:
    """With a `local` among the keys, `folder` is the remote."""
    stream = {"local": keys.pop("local"), "remote": folder} if "local" in keys else {"local": str(folder)}
    defaults = {"num_workers": 0, "num_canonical_nodes": 2, "shuffle_block_size": 64}
    return DataConfig.model_validate({"sequence_length": LENGTH, "train": stream, **defaults, **keys})


def open_rows(config: DataConfig, batch: int = BATCH, *, train: bool = True) -> Any:
    return build_loader(config.reading, config.streams, batch, seed=3, train=train)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["input_ids"][:, 0]]


def global_batches(dataset: Any, world: World, global_batch: int, start: int = 0) -> np.ndarray:
    """The rows of each global batch [batches, rows] as the ranks' loaders deliver them, in canonical order.

    That order gives its rows to the nodes in turn, and each node's to its ranks in turn.
    """
    nodes, ranks, workers, size = world.num_nodes, world.ranks_per_node, world.workers_per_rank, dataset.batch_size
    dataset._set_shuffle_block_size(world)
    rows, batches = shuffled_rows(dataset, 0), (dataset.epoch_size - start) // global_batch
    read = np.empty((batches, size, ranks, nodes), np.int64)
    for number in range(world.num_workers):
        place = World(nodes, ranks, workers, number)
        own = own_rows(rows, dataset.num_canonical_nodes, start, place, size, batches)
        # A rank's loader takes a batch from each of its processes in turn.
        read[place.worker_of_rank :: workers, :, place.rank_of_node, place.node] = own.reshape(-1, size)
    return read.reshape(batches, -1)
