"""The shards are, byte for byte, those of Streaming's writer."""

import json
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter

from biphasic.conversion.shard_writer import HASH, ShardWriter
from biphasic.data.packing import Row, mds_columns, padded


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:9"])
@pytest.mark.parametrize(
    ("length", "dtype", "size"), [(16, "uint16", 700), (300, "uint32", 2**16), (70000, "uint16", 2**20)]
)
def test_the_files_and_entries_are_those_of_streaming(
    length: int, dtype: str, size: int, compression: str | None, tmp_path: Path
) -> None:
    generator = np.random.default_rng(length)
    theirs = MDSWriter(
        out=str(tmp_path / "theirs"),
        columns=mds_columns(length, dtype),
        compression=compression,
        hashes=[HASH],
        size_limit=size,
    )
    ours = ShardWriter(tmp_path / "ours", length, dtype, 3, compression, size)
    for number in range(60):
        # One segment a row, many short ones (more than 255 and than 65,535 need wider lengths), and rows with padding.
        lengths = [1] * length if number % 20 == 7 else [length // 2, *([3] if number % 2 else [])]
        tokens = generator.integers(0, 1000, sum(lengths)).astype(dtype)
        row = Row(tokens, np.array(lengths, np.uint32))
        theirs.write(padded(row, length, 3))
        ours.write(row)
    theirs.finish()
    ours.finish()
    index = json.loads((tmp_path / "theirs" / "index.json").read_text())
    assert json.loads(json.dumps(ours.shards)) == index["shards"]
    assert len(ours.shards) > 1
    names = {file.name for file in (tmp_path / "theirs").iterdir()} - {"index.json"}
    assert {file.name for file in (tmp_path / "ours").iterdir()} == names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_row_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shards", 100, "uint16", 0, None, 150)
    for _ in range(3):
        writer.write(Row(np.ones(100, np.uint16), np.array([100], np.uint32)))
    writer.finish()
    assert [shard["samples"] for shard in writer.shards] == [1, 1, 1]
