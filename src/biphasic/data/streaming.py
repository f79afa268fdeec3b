"""From shards to batches on the host: rows, their segments, and which rows they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import DataSpec
from streaming import StreamingDataset
from torch.utils.data import DataLoader

from biphasic.config.errors import UserError
from biphasic.config.schema import DataConfig, StreamConfig

Batch = dict[str, Any]
"""A batch: `tokens` int64 [rows, length], `segment_ids` int32 [rows, length] (1 for a row's first segment; 0 at padding),
`rows` int64 [rows] (ids in the dataset), `lengths` (for each row, its segments' lengths, on the host)."""


class RowDataset(StreamingDataset):
    """Packed rows as `biphasic.data.convert` wrote them, each with its id in the dataset."""

    def __getitem__(self, at: Any) -> Any:
        """The row `at`, or the rows of a slice."""
        row = super().__getitem__(at)
        return row if isinstance(row, list) else {**row, "row": int(at)}


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


def loader(config: DataConfig, stream: StreamConfig, batch_size: int, seed: int, *, train: bool) -> DataSpec:
    """The batches of one rank, for Composer.

    Args:
        config: the YAML's `data:` section.
        stream: the split.
        batch_size: rows in a rank's batch.
        seed: of the order, unless the YAML gives `shuffle_seed`.
        train: shuffle as the YAML says, and leave out an incomplete last batch; otherwise go through in order.

    Raises:
        UserError: the split isn't there or can't be opened.
    """
    if stream.remote is None and not (Path(stream.local) / "index.json").is_file():
        raise UserError(f"no dataset in {stream.local} (it has no index.json): convert one first, see docs/data.md")
    try:
        dataset = RowDataset(
            local=stream.local,
            remote=stream.remote,
            batch_size=batch_size,
            shuffle=train and config.shuffle,
            shuffle_algo=config.shuffle_algo,
            shuffle_seed=seed if config.shuffle_seed is None else config.shuffle_seed,
            shuffle_block_size=config.shuffle_block_size,
            num_canonical_nodes=config.num_canonical_nodes,
            predownload=config.predownload,
            cache_limit=config.cache_limit,
            download_retry=config.download_retry,
            download_timeout=config.download_timeout,
            validate_hash=_hash_of(stream) if config.check_hashes else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"dataset {stream.remote or stream.local}: can't be opened ({first})") from error
    stored = _row_length(dataset)
    if stored != config.sequence_length:
        raise UserError(
            f"data.sequence_length is {config.sequence_length}, but the rows in {stream.remote or stream.local} have "
            f"{stored} tokens: they were converted with another sequence_length"
        )
    if train and len(dataset) < batch_size:
        where = stream.remote or stream.local
        raise UserError(
            f"dataset {where}: a rank's batch needs {batch_size} rows, and a rank's share is {len(dataset)}"
        )
    batches = DataLoader(
        dataset,
        batch_size=batch_size,
        drop_last=train,
        num_workers=config.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=config.num_workers > 0,
    )
    return DataSpec(
        batches,
        split_batch=split_batch,
        get_num_samples_in_batch=rows_in_batch,
        get_num_tokens_in_batch=tokens_in_batch,
    )


def _row_length(dataset: RowDataset) -> int:
    """Tokens in a row, as the first shard declares its column (`ndarray:uint16:2048`)."""
    shard: Any = dataset.shards[0]
    return int(dict(zip(shard.column_names, shard.column_encodings, strict=True))["tokens"].rpartition(":")[2])


def _hash_of(stream: StreamConfig) -> str | None:
    """The hash that the shards were written with, where the index can be read without a download."""
    index = Path(stream.local) / "index.json"
    shards = json.loads(index.read_text())["shards"] if index.is_file() else []
    return next(iter(shards[0]["hashes"]), None) if shards else None
