"""From shards to batches on the host: rows, their segments, and which rows they are."""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from typing import Any

import numpy as np
import torch
from composer.core import DataSpec
from filelock import FileLock
from streaming import StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.util import bytes_to_int
from torch.utils.data import DataLoader

from biphasic.config.errors import UserError, is_lost_rank
from biphasic.config.schema import DataConfig, StreamConfig
from biphasic.data.cache_limit import require_room
from biphasic.data.loader_signals import in_loader
from biphasic.data.shards import LoaderError, ShardError, check_hashes, open_stream
from biphasic.data.shared_memory import names_from_first_rank
from biphasic.storage import short
from biphasic.versions import require_form

Batch = dict[str, Any]
"""A batch: `tokens` int64 [rows, length], `segment_ids` int32 [rows, length] (1 for a row's first segment; 0 at padding),
`rows` int64 [rows] (ids in the dataset), `lengths` (for each row, its segments' lengths, on the host)."""


class RowDataset(StreamingDataset):
    """Packed rows as `biphasic.data.convert` wrote them, each with its id in the dataset, or in the whole mix."""

    def __getitem__(self, at: Any) -> Any:
        """The row `at`, or the rows of a slice."""
        row = super().__getitem__(at)
        return row if isinstance(row, list) else {**row, "row": int(at)}

    def make_epoch_whole_batches(self) -> None:
        """End an epoch with its last whole global batch.

        Streaming fills an epoch up with repeated rows until it divides by ranks and nodes, so that the number of batches
        would depend on theirs.
        """
        assert self.batch_size is not None
        ranks = self._parallel_rank_world.num_ranks
        self.length = self.epoch_size // (ranks * self.batch_size) * self.batch_size

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a shard on this machine. What fails in the background fails again, and is raised, when a row is needed.

        Streaming's threads would end the epoch early and without a word, and other processes wait for the shard forever.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except ShardError:
            # "Here, but not unpacked": who needs a row of it tries again, and sees the error.
            with FileLock(self._cache_filelock_path):
                self._shard_states[shard_id] = _ShardState.LOCAL
                self._shard_access_times[shard_id] = time_ns()
            if blocking:
                raise

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Any:
        """This worker's rows of the epoch. A run can start on some numbers of nodes only, and go on with any."""
        nodes, canonical = self._parallel_worker_world.num_nodes, self.num_canonical_nodes or 1
        if self.initial_physical_nodes is None and canonical % nodes and nodes % canonical:
            message = f"expected a multiple or a divisor of the number of nodes ({nodes})"
            raise LoaderError(f"data.num_canonical_nodes: {message}; got {canonical}")
        return super()._get_work(epoch, sample_in_epoch)


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
        "tokens": torch.from_numpy(tokens),
        "segment_ids": torch.from_numpy(segment_ids),
        "rows": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
        "lengths": lengths,
    }


def split_batch(batch: Batch, size: int | float) -> list[Batch]:
    """Cut a batch into microbatches of `size` rows; what does not belong to a row goes to each."""
    total = len(batch["lengths"])
    by_row = {name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() == 2}
    by_row |= {"rows", "lengths"}
    return [
        {name: value[at : at + int(size)] if name in by_row else value for name, value in batch.items()}
        for at in range(0, total, int(size))
    ]


def row_segments(batch: Batch) -> list[int]:
    """Lengths of all segments of the flattened batch; the padding at a row's end is a segment of its own."""
    length = batch["tokens"].shape[1]
    found: list[int] = []
    for lengths in batch["lengths"]:
        found += lengths
        if (rest := length - sum(lengths)) > 0:
            found.append(rest)
    return found


def rows_in_batch(batch: Batch) -> int:
    """Rows in a batch."""
    return len(batch["lengths"])


def tokens_in_batch(batch: Batch) -> int:
    """Tokens in a batch, padding not counted."""
    return sum(sum(lengths) for lengths in batch["lengths"])


def loader(
    config: DataConfig, streams: dict[str, StreamConfig], batch_size: int, seed: int, *, train: bool
) -> DataSpec:
    """The batches of one rank, for Composer.

    Args:
        config: the YAML's `data:` section.
        streams: one split, or the streams of a mix, by their keys in the YAML.
        batch_size: rows in a rank's batch.
        seed: of the order, unless the YAML gives `shuffle_seed`.
        train: shuffle as the YAML says, and leave out an incomplete last batch; otherwise go through in order.

    Raises:
        UserError: a stream isn't there, is unfinished or can't be opened, or the cache is too small for it. While the
            batches are read: a shard can't be had or is damaged (a `ShardError`).
    """
    require_form("mosaicml-streaming", StreamingDataset, "_get_work", RowDataset._get_work)
    opened = [open_stream(config, stream) for stream in streams.values()]
    where = ", ".join(stream.remote or stream.local for stream in streams.values())
    # What has no remote is no cache: a limit would delete the data itself.
    limit = config.cache_limit if all(stream.remote is not None for stream in streams.values()) else None
    try:
        with names_from_first_rank():
            dataset = RowDataset(
                streams=opened,
                epoch_size=config.epoch_rows if train else None,
                batch_size=batch_size,
                shuffle=train and config.shuffle,
                shuffle_algo=config.shuffle_algo,
                shuffle_seed=seed if config.shuffle_seed is None else config.shuffle_seed,
                shuffle_block_size=config.shuffle_block_size,
                num_canonical_nodes=config.num_canonical_nodes,
                predownload=config.predownload,
            )
    except (OSError, ValueError, RuntimeError) as error:
        if is_lost_rank(error):
            raise
        raise UserError(f"dataset {where}: can't be opened ({short(error)})") from error
    _require_row_length(dataset, streams, config.sequence_length)
    if limit is not None:
        require_room(limit, dataset, config.num_workers)
        dataset.cache_limit = bytes_to_int(limit)
    if config.check_hashes:
        for stream in opened:
            check_hashes(stream)
    if train:
        if len(dataset) < batch_size:
            raise UserError(
                f"dataset {where}: a rank's batch needs {batch_size} rows, and a rank's share is {len(dataset)}"
            )
        dataset.make_epoch_whole_batches()
    batches = DataLoader(
        dataset,
        batch_size=batch_size,
        drop_last=train,
        num_workers=config.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=config.num_workers > 0,
        worker_init_fn=in_loader,
    )
    return DataSpec(
        batches,
        split_batch=split_batch,
        get_num_samples_in_batch=rows_in_batch,
        get_num_tokens_in_batch=tokens_in_batch,
    )


def _require_row_length(dataset: RowDataset, streams: dict[str, StreamConfig], expected: int) -> None:
    """Compare the tokens in a row, as each stream's first shard declares its column (`ndarray:uint16:2048`)."""
    for number, (key, stream) in enumerate(streams.items()):
        shard: Any = dataset.shards[int(dataset.shard_offset_per_stream[number])]
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        stored = int(encodings["tokens"].rpartition(":")[2])
        if stored != expected:
            raise UserError(
                f"data.sequence_length is {expected}, but the rows of {key} in {stream.remote or stream.local} have "
                f"{stored} tokens: they were converted with another sequence_length"
            )
