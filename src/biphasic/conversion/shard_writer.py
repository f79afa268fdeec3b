"""Write rows to MDS shards: the bytes and index entries of Streaming's own writer, without importing Streaming and torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from biphasic.data.packing import Row, mds_columns

HASH = "xxh64"
"""Hash algorithm for the shard files. Streaming can check the hashes when it opens the files."""
_ZSTD_LEVEL = 3


class ShardWriter:
    """Writes rows to shards of at most `shard_bytes` before compression in `folder`, which it creates.

    Rows are padded with `pad_id` to `sequence_length` tokens. `compression` is `zstd`, `zstd:LEVEL` or None. `shards` holds
    the entries of finished shards in the MDS index. A shard begins with the number of rows, followed by one more offset
    than rows, all uint32, and a description of the columns as JSON; row i lies between offsets i and i + 1 (MDS version 2,
    as `streaming.MDSWriter` writes it).
    """

    def __init__(
        self, folder: Path, sequence_length: int, dtype: str, pad_id: int, compression: str | None, shard_bytes: int
    ):
        columns = sorted(mds_columns(sequence_length, dtype).items())
        self.shards: list[dict[str, Any]] = []
        self._folder, self._compression, self._shard_bytes = folder, compression, shard_bytes
        self._padding = np.full(sequence_length, pad_id, dtype)
        self._format = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": [HASH],
            "size_limit": shard_bytes,
            "column_names": [name for name, _ in columns],
            "column_encodings": [encoding for _, encoding in columns],
            "column_sizes": [None, self._padding.nbytes],
        }
        self._head = json.dumps(self._format, sort_keys=True).encode()
        self._rows: list[bytes] = []
        self._size = 0
        folder.mkdir(parents=True)

    def write(self, row: Row) -> None:
        """Add a row, and write the shard that it no longer fits into."""
        padding = self._padding[len(row.tokens) :]
        lengths = _one_dimensional(row.lengths)
        encoded = b"".join((np.uint32(len(lengths)).tobytes(), lengths, row.tokens.tobytes(), padding.tobytes()))
        # Counted like Streaming: for each row 4 bytes of its offset, and for the shard 8 beside the description.
        if self._rows and self._size + len(encoded) + 4 > self._shard_bytes:
            self.finish()
        self._size = (self._size or 8 + len(self._head)) + len(encoded) + 4
        self._rows.append(encoded)

    def finish(self) -> None:
        """Write the rows that are in no shard yet, if any, to a last one."""
        if not self._rows:
            return
        start = 4 + 4 * (len(self._rows) + 1) + len(self._head)
        offsets = np.cumsum([start, *map(len, self._rows)]).astype(np.uint32)
        content = b"".join((np.uint32(len(self._rows)).tobytes(), offsets.tobytes(), self._head, *self._rows))
        name = f"shard.{len(self.shards):05}.mds"
        entry = {"samples": len(self._rows), "raw_data": _described(content, name), "zip_data": None, **self._format}
        if self._compression is not None:
            import zstd

            level = self._compression.partition(":")[2]
            content, name = zstd.compress(content, int(level or _ZSTD_LEVEL)), f"{name}.zstd"
            entry["zip_data"] = _described(content, name)
        (self._folder / name).write_bytes(content)
        self.shards.append(entry)
        self._rows, self._size = [], 0


def _one_dimensional(values: np.ndarray) -> bytes:
    """Return an array [n] as MDS stores one of unknown shape: the width of n with the number of dimensions, n, values."""
    width = next(number for number in range(4) if len(values) < 1 << (8 << number))
    return bytes([1 << 2 | width]) + len(values).to_bytes(1 << width, "little") + values.tobytes()


def _described(content: bytes, name: str) -> dict[str, Any]:
    return {"basename": name, "bytes": len(content), "hashes": {HASH: xxhash.xxh64(content).hexdigest()}}
