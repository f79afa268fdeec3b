"""Load packed rows from MDS shards with Streaming, and stack them into batches on the host."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from streaming import StreamingDataset
from streaming.base.constant import EPOCH_DATA
from streaming.base.dataset import _ShardState
from streaming.base.shared import SharedArray, SharedMemory, prefix
from torch import Tensor

from biphasic.data.epoch_order import own_rows, shuffled_rows
from biphasic.data.loader_signals import Loader
from biphasic.data.mds_reader import ShardError, StoredRow, row_reader
from biphasic.data.shards import open_stream
from biphasic.data.shared_memory import names_chosen_by_local_rank_0, require_shared_memory
from biphasic.data.streams import INDEX, ReadingSettings, RowStream, opened_streams
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError, first_line, is_lost_rank
from biphasic.processes import require_short_temporary_folder
from biphasic.storage import user_error
from biphasic.versions import require_form

Batch = dict[str, Any]
"""`input_ids` int64 [rows, length], `segment_ids` int32 [rows, length] (from 1 in each row; 0 at padding), `row_ids` int64
[rows] (ids in the dataset or the mix), `lengths` (for each row, a list of its segment lengths)."""


class RowDataset(StreamingDataset):
    """A dataset of packed rows, each with its id in the dataset or in the mix.

    Attributes:
        first_epoch: epoch in the order of rows in which reading begins.
        first_row: number of that epoch's rows, over all ranks, that come before the first one to read.
        has_whole_batches: whether an epoch ends with its last complete global batch.
    """

    first_epoch = first_row = 0
    has_whole_batches = False

    def __getitem__(self, at: Any) -> Any:
        row = super().__getitem__(at)
        return row if isinstance(row, list) else {**row, "row_id": int(at)}

    def make_epoch_whole_batches(self) -> None:
        """End an epoch with its last complete global batch, whatever the number of ranks and nodes.

        Streaming repeats rows until the epoch divides evenly among them.
        """
        assert self.batch_size is not None
        ranks = self._parallel_rank_world.num_ranks
        self.length = self.epoch_size // (ranks * self.batch_size) * self.batch_size
        self.has_whole_batches = True

    def start_at(self, epoch: int, row: int) -> None:
        """Begin the next iteration at a row of an epoch. No loader process of this dataset may exist."""
        self.first_epoch, self.first_row = epoch, row
        if self._unique_rank_world.is_local_leader:
            self.next_epoch = 0

    def are_repeated(self, first: int, count: int) -> Tensor:
        """Return which of this rank's rows `first` to `first + count` are read a second time: bool [count].

        Streaming repeats the last rows until each rank has the same number. For rows in order, of one canonical node.
        """
        world = self._parallel_rank_world
        of_node = torch.arange(first, first + count) * world.ranks_per_node + world.rank_of_node
        return of_node * world.num_nodes + world.node >= self.num_samples

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download a shard. An error in a background thread is raised only when one of the shard's rows is needed.

        Otherwise the epoch would end early without an error, and other processes would wait for the shard forever.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except ShardError:
            # Mark the shard as downloaded, not unpacked: a process that needs a row tries again and gets the error.
            with FileLock(self._cache_filelock_path):
                self._shard_states[shard_id] = _ShardState.LOCAL
                self._shard_access_times[shard_id] = time_ns()
            if blocking:
                raise

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Any:
        first, epoch = self.first_row if epoch == 0 else 0, epoch + self.first_epoch
        if not self.has_whole_batches:
            return super()._get_work(epoch, first)
        # As in Streaming's: a lock can't be pickled, so each process makes its own.
        if not hasattr(self._shared_barrier, "lock"):
            self._shared_barrier.lock = FileLock(self._shared_barrier.filelock_path)
        assert self.batch_size is not None and self.num_canonical_nodes is not None
        shared, world = self._share_order(epoch), self._parallel_worker_world
        rows = np.ndarray(self.epoch_size, self._id_type, shared.buf)
        # Composer ends an epoch after `len` batches, but can't do so in an epoch that doesn't begin with its first row.
        batches = (self.epoch_size - first) // (self._parallel_rank_world.num_ranks * self.batch_size)
        own = own_rows(rows, self.num_canonical_nodes, first, world, self.batch_size, batches)
        del rows  # shared memory can't be closed while an array uses it
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        shared.cleanup()
        return own

    @property
    def _id_type(self) -> Any:
        return np.uint32 if self.num_samples < 2**32 else np.int64  # half the memory

    def _share_order(self, epoch: int) -> SharedMemory:
        """Return the rows of an epoch in their order, `_id_type` [rows], which one process of this node writes."""
        world, name = self._unique_worker_world, prefix._get_path(self._shm_prefix_int, EPOCH_DATA)
        size = self.epoch_size * np.dtype(self._id_type).itemsize
        if not world.is_local_leader:
            self._shared_barrier(world.workers_per_node)
            return SharedMemory(name, create=False, size=size, auto_cleanup=False)
        rows = shuffled_rows(self, epoch)
        shared = SharedMemory(name, create=True, size=size, auto_cleanup=False)
        np.ndarray(rows.shape, self._id_type, shared.buf)[:] = rows
        self._shared_barrier(world.workers_per_node)
        return shared


class _ValidationLoader(Loader):
    """A loader of rows in order. Rows that are read a second time are padding, which has no targets."""

    def __iter__(self) -> Iterator[Batch]:  # pyright: ignore[reportIncompatibleMethodOverride] - as DataLoader's is used
        first, dataset = 0, self.dataset
        assert isinstance(dataset, RowDataset)
        for batch in super().__iter__():
            rows = len(batch["row_ids"])
            batch["segment_ids"][dataset.are_repeated(first, rows)] = 0
            first += rows
            yield batch


def collate(rows: Sequence[dict[str, Any]]) -> Batch:
    """Stack rows of one length into a batch."""
    tokens = np.stack([row["tokens"] for row in rows]).astype(np.int64)
    segment_ids = np.zeros(tokens.shape, dtype=np.int32)
    lengths = []
    for index, row in enumerate(rows):
        counts = row["lengths"].astype(np.int64)
        segment_ids[index, : counts.sum()] = np.repeat(np.arange(1, len(counts) + 1), counts)
        lengths.append(counts.tolist())
    return {
        "input_ids": torch.from_numpy(tokens),
        "segment_ids": torch.from_numpy(segment_ids),
        "row_ids": torch.tensor([row["row_id"] for row in rows], dtype=torch.int64),
        "lengths": lengths,
    }


def build_loader(
    settings: ReadingSettings,
    streams: Mapping[str, RowStream],
    batch_size: int,
    seed: int,
    *,
    train: bool,
    batches: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Loader:
    """Build the data loader for one rank's batches.

    Args:
        settings: how the rows are read.
        streams: one split, or the streams of a mix, by their keys in the YAML.
        batch_size: rows per rank.
        seed: seed for shuffling.
        train: whether to shuffle and drop an incomplete last batch. Otherwise rows are read in order.
        batches: number of global batches that a validation reads, spread over the split. None: all of it.
        tokenizer: the one of the rows, whose ids and padding are compared with them. None: not checked.

    Raises:
        UserError: a stream is missing, unfinished or can't be opened, its rows have other columns or another length, the
            cache limit is too small, or the path of the temporary folder is too long.
        ShardError: a shard can't be downloaded or is damaged, or a row doesn't fit. Raised while batches are read.
    """
    require_form("mosaicml-streaming", StreamingDataset, "_get_work", RowDataset._get_work)
    if settings.num_workers:
        require_short_temporary_folder()
    streams = opened_streams(streams)[0]
    opened = [open_stream(stream) for stream in streams.values()]
    names = ", ".join(stream.remote or stream.local for stream in streams.values())
    # Without a remote, the stream's folder holds the data itself, and a cache limit would delete it.
    limit = settings.cache_limit if all(stream.remote is not None for stream in streams.values()) else None
    try:
        with names_chosen_by_local_rank_0():
            dataset = RowDataset(
                streams=opened,
                epoch_size=settings.epoch_rows if train else None,
                batch_size=batch_size,
                shuffle=train,
                shuffle_algo="py1e",
                shuffle_seed=seed,
                shuffle_block_size=settings.shuffle_block_size,
                num_canonical_nodes=settings.num_canonical_nodes,
                predownload=settings.predownload,
            )
    except (OSError, ValueError, RuntimeError) as error:
        if is_lost_rank(error):
            raise
        raise user_error(f"dataset {names}: can't be opened ({first_line(error)})", error) from error
    # Streaming starts only on a number of nodes that divides `num_canonical_nodes` or is a multiple of it, unless it resumes
    # a run that began on one node. So it is told that this run did.
    dataset.initial_physical_nodes = 1
    canonical, ranks = settings.num_canonical_nodes, dataset._parallel_rank_world.num_ranks
    if train and dataset.epoch_size < canonical:
        expected = f"expected at most the number of rows in an epoch of {names}, {dataset.epoch_size:,}"
        raise UserError(f"data.num_canonical_nodes: {expected}; got {canonical}")
    # With several canonical nodes, the rows beyond a multiple of them are repeated or left out. Their purpose in a
    # validation is only to spread a part of a split's batches over the split.
    in_turn = dataset.num_samples // canonical * canonical
    if not train and (batches is None or min(in_turn + 1, dataset.num_samples) <= batches * batch_size * ranks):
        dataset.num_canonical_nodes = 1
    loaders = settings.num_workers * dataset._parallel_rank_world.ranks_per_node
    require_shared_memory(dataset.epoch_size, settings.sequence_length, batch_size, loaders)
    _set_readers(dataset, streams, settings.sequence_length, tokenizer)
    if limit is not None:
        _require_room(limit, dataset, settings.num_workers)
        dataset.cache_limit = limit
    if train:
        if (share := len(dataset)) < batch_size:
            raise UserError(f"dataset {names}: a rank's batch needs {batch_size} rows, and a rank's share is {share}")
        dataset.make_epoch_whole_batches()
    # With several canonical nodes, repeated rows aren't the last ones.
    loader = _ValidationLoader if not train and dataset.num_canonical_nodes == 1 else Loader
    return loader(
        dataset,
        batch_size=batch_size,
        drop_last=train,
        num_workers=settings.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
    )


def _set_readers(dataset: RowDataset, streams: Mapping[str, RowStream], length: int, tokenizer: Tokenizer | None) -> None:
    # Shared by the processes of this machine, and removed with the dataset's other shared memory.
    checked = SharedArray(dataset.num_shards, np.uint8, prefix._get_path(dataset._shm_prefix_int, "checked"))
    for number, (key, stream) in enumerate(streams.items()):
        index, own = json.loads((Path(stream.local) / INDEX).read_text(encoding="utf-8")), dataset.streams[number]
        read, first = row_reader(key, stream, index, length, tokenizer), int(dataset.shard_offset_per_stream[number])
        own.validate_hash = next((name for entry in index["shards"][:1] for name in entry["hashes"]), None)
        for at, shard in enumerate(dataset.shards[first : first + len(index["shards"])], start=first):
            _set_reader(shard, own, at, checked, read)


def _set_reader(shard: Any, stream: Any, number: int, checked: SharedArray, read: Callable[[Any], StoredRow]) -> None:
    """Read the rows of a shard with `read`, after its file was compared with the index by a process of this machine."""
    get_item, is_checked = shard.get_item, False

    def read_row(at: int) -> StoredRow:
        nonlocal is_checked
        is_checked = is_checked or stream.require_unchanged(shard, number, checked)
        try:
            row = get_item(at)
        except (ValueError, LookupError) as error:
            problem = f"was changed while it was read ({first_line(error)})"
            raise ShardError(f"shard {stream.local}/{shard.file_pairs[0][0].basename}: {problem}") from error
        return read(row)

    shard.get_item = read_row


def _require_room(limit: int, dataset: StreamingDataset, workers: int) -> None:
    """Refuse a cache limit below the shards that a node reads at a time: each row would need a download of its own.

    The UserError names the smallest sufficient limit.
    """
    largest = max(shard.get_max_size() for shard in dataset.shards)
    shards = _shards_in_use(dataset, workers)
    indexes = sum(stream.get_index_size() for stream in dataset.streams)
    # Streaming itself requires space for four shards.
    smallest = indexes + max(shards, 4) * largest
    if limit < smallest:
        need = f"rows of up to {shards:,} shards at a time, the largest of {largest:,} bytes unpacked and packed"
        other = f"a smaller data.predownload (now {dataset.predownload:,}) or data.shuffle_block_size"
        problem = f"{limit:,}b is too small: a node reads {need}"
        raise UserError(f"data.cache_limit: {problem}; expected at least {smallest:,}b, or {other}")


def _shards_in_use(dataset: StreamingDataset, workers: int) -> int:
    """Return the maximum number of shards from which a node's loader processes read or download ahead at a time."""
    world, canonical = dataset._parallel_rank_world, dataset.num_canonical_nodes or 1
    assert dataset.predownload is not None and dataset.batch_size is not None
    processes = world.ranks_per_node * max(workers, 1)
    # Each process reads a batch, the rows ahead of it, and one more row.
    rows = processes * (dataset.batch_size + dataset.predownload + 1)
    is_divisible = canonical % world.num_nodes == 0 or world.num_nodes % canonical == 0
    local_canonical = max(canonical // world.num_nodes, 1) if is_divisible else canonical
    rows_per_shard = dataset.num_samples / dataset.num_shards
    spread = (dataset.shuffle_block_size or dataset.num_samples) if dataset.shuffle else 0
    # A node reads its canonical nodes in parallel, each from a different part of the dataset. All nodes together read
    # `rows * num_nodes` rows at a time.
    in_parallel = local_canonical * (math.ceil((spread + rows * world.num_nodes / canonical) / rows_per_shard) + 1)
    return min(dataset.num_shards, rows, in_parallel)
