import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.compression import decompress
from streaming.base.hashing import get_hash
from streaming.base.util import merge_index

from biphasic.config.convert import ConvertConfig
from biphasic.conversion import verify as verifying
from biphasic.conversion.convert import convert
from biphasic.conversion.verify import verify
from biphasic.data.mds_reader import read_rows, row_as_text
from biphasic.data.packing import mds_columns
from biphasic.data.streams import read_index
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.texts import sentences, write_parquet, write_tokenizer

SHARD, EOS = 8192, 2
Change = Callable[[np.ndarray, np.ndarray], None]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    keys = {
        "job": "convert",
        "source": {"kind": "files", "paths": [str(write_parquet(folder / "text.parquet", sentences(200)))]},
        "output": str(folder / "out"),
        "tokenizer": str(tokenizer_folder),
        "sequence_length": 64,
        "shard_bytes": SHARD,
        "validation_fraction": 0.2,
    }
    convert(ConvertConfig.model_validate(keys))
    return folder / "out"


@pytest.fixture
def output(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "out")


def row_count(dataset: str) -> int:
    return sum(shard["samples"] for shard in read_index(dataset)["shards"])


def faults(output: Path) -> list[str]:
    return verify(str(output)).faults


def unit_of(output: Path) -> str:
    """The only work unit's name."""
    [name] = json.loads((output / "conversion.json").read_text())["units"]
    return name


def shard_of(output: Path, number: int, split: str = "train") -> Path:
    return output / split / unit_of(output) / f"shard.{number:05d}.mds.zstd"


def edit_record(output: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = output / "conversion.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def rewrite(output: Path, change: Change) -> None:
    """Change the first row of the training split and make everything but its content consistent again."""
    unit = unit_of(output)
    folder = output / "train"
    rows = [row for _, row in read_rows(str(folder), range(row_count(str(folder))))]
    row = {name: column.copy() for name, column in rows[0].items()}
    change(row["tokens"], row["lengths"])
    shutil.rmtree(folder)
    with MDSWriter(
        columns=mds_columns(64, "uint16"),
        out=str(folder / unit),
        compression="zstd",
        hashes=["xxh64"],
        size_limit=SHARD,
    ) as writer:
        for stored in [row, *rows[1:]]:
            writer.write(stored)
    merge_index(str(folder), keep_local=True)
    (folder / unit / "index.json").unlink()
    index = json.loads((folder / "index.json").read_text())

    def edit(record: dict[str, Any]) -> None:
        train = record["splits"]["train"]
        train["index_sha256"] = hashlib.sha256((folder / "index.json").read_bytes()).hexdigest()
        train["bytes"] = sum(shard["zip_data"]["bytes"] for shard in index["shards"])

    edit_record(output, edit)


def test_an_intact_conversion_has_no_faults(output: Path) -> None:
    result = verify(str(output))
    assert result.faults == []
    assert [line.split(":")[0] for line in result.summary] == ["train", "validation", "sources"]
    assert result.summary[-1] == "sources: 1 files, unchanged"


def test_a_rewritten_conversion_has_no_faults(output: Path) -> None:
    """So that the faults of the tests below come from their changes alone."""
    rewrite(output, lambda tokens, lengths: None)
    assert faults(output) == []


def test_a_flipped_bit(output: Path) -> None:
    shard = shard_of(output, 1)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert faults(output) == [f"train/{unit_of(output)}/shard.00001.mds.zstd: its content has changed (another hash)"]


def test_a_missing_shard(output: Path) -> None:
    shard_of(output, 0, "validation").unlink()
    assert faults(output) == [f"validation/{unit_of(output)}/shard.00000.mds.zstd: is missing"]


def test_a_shard_cut_short(output: Path) -> None:
    shard = shard_of(output, 0)
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-5])
    assert faults(output) == [f"train/{unit_of(output)}/shard.00000.mds.zstd: has {size - 5:,} bytes instead of {size:,}"]


def test_an_unpacked_copy_that_was_changed(output: Path) -> None:
    """Streaming unpacks a shard beside the compressed one, and reads that from then on."""
    index = json.loads((output / "train" / "index.json").read_text())
    name = f"{unit_of(output)}/shard.00000.mds"
    [stored] = [shard for shard in index["shards"] if shard["raw_data"]["basename"] == name]
    content = decompress("zstd", (output / "train" / stored["zip_data"]["basename"]).read_bytes())
    (output / "train" / name).write_bytes(content)
    assert faults(output) == []
    (output / "train" / name).write_bytes(content[:-1] + b"x")
    assert faults(output) == [f"train/{name}.zstd: its unpacked copy {name} has changed; remove it"]


def test_a_file_that_the_record_lacks(output: Path) -> None:
    (output / "train" / "shard.00099.mds.zstd").write_bytes(b"x")
    assert faults(output) == ["train/shard.00099.mds.zstd: is not in the record"]


@pytest.mark.parametrize("what", ["tokens", "rows", "documents"])
def test_a_wrong_count(output: Path, what: str) -> None:
    edit_record(output, lambda record: record["splits"]["train"].update({what: record["splits"]["train"][what] + 1}))
    [fault] = faults(output)
    assert fault.startswith("train: holds ")
    assert f" {what}, but the record says " in fault


def fill(value: int, at: int) -> Change:
    def change(tokens: np.ndarray, lengths: np.ndarray) -> None:
        tokens[at] = value

    return change


def set_length(at: int, value: int) -> Change:
    def change(tokens: np.ndarray, lengths: np.ndarray) -> None:
        lengths[at] = value

    return change


def shorten(tokens: np.ndarray, lengths: np.ndarray) -> None:
    lengths[-1] -= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fill(300, 3), "row 0: holds id 300, and the vocabulary has 300"),
        (fill(3, 3), "row 0: holds a mask token"),
        (set_length(0, 0), "row 0: its segment lengths are impossible: [0"),
        (set_length(0, 65), "row 0: its segment lengths are impossible: [65"),
        (shorten, "row 0: holds something other than padding after its last segment"),
    ],
)
def test_an_impossible_row_is_a_fault(output: Path, change: Change, message: str) -> None:
    rewrite(output, change)
    [fault] = faults(output)
    assert fault.startswith(f"train/{unit_of(output)}/shard.00000.mds.zstd: {message}")


def test_an_end_of_document_too_many(output: Path) -> None:
    rewrite(output, fill(EOS, 3))
    [fault] = faults(output)
    assert fault.startswith("train: holds ")
    assert "documents" in fault


def test_an_index_that_was_changed(output: Path) -> None:
    path = output / "train" / "index.json"
    path.write_text(path.read_text().replace("xxh64", "xxh65"))
    assert "train/index.json: is not the one that the record names (another sha256)" in faults(output)
    path.write_text("{")
    assert faults(output)[0].startswith("train/index.json: can't be read")


def test_another_tokenizer(output: Path) -> None:
    write_tokenizer(output / "tokenizer", words=290)
    assert faults(output) == ["tokenizer/: is not the tokenizer that the record names (another sha256)"]
    shutil.rmtree(output / "tokenizer")
    assert faults(output)[0].startswith("tokenizer/: can't be loaded")


def test_a_damaged_shard_whose_hash_is_right(output: Path) -> None:
    shard = shard_of(output, 0)
    content = b"\x00" * shard.stat().st_size
    shard.write_bytes(content)
    path = output / "train" / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0]["zip_data"]["hashes"]["xxh64"] = get_hash("xxh64", content)
    path.write_text(json.dumps(index))
    index_hash = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_record(output, lambda record: record["splits"]["train"].update(index_sha256=index_hash))
    [fault] = faults(output)
    assert fault.startswith(f"train/{unit_of(output)}/shard.00000.mds.zstd: can't be decoded")


def test_no_conversion(output: Path, tmp_path: Path) -> None:
    (output / "conversion.json").write_text("{")
    with pytest.raises(UserError, match=r"conversion\.json: can't be read"):
        verify(str(output))
    (output / "conversion.json").unlink()
    for folder in (output, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"holds no conversion\.json"):
            verify(str(folder))


def test_rows_as_text(output: Path) -> None:
    tokenizer = load_tokenizer(str(output / "tokenizer"))
    last = row_count(str(output / "train")) - 1
    rows = dict(read_rows(str(output / "train"), [last, 0, last + 1]))
    assert list(rows) == [0, last]
    text = row_as_text(rows[0], tokenizer)
    assert text.count("--- segment") == len(rows[0]["lengths"])
    assert ("--- padding" in text) == (rows[0]["lengths"].sum() < 64)


@pytest.mark.parametrize("name", ["same", "copy"])
def test_a_unit_that_was_written_twice(output: Path, name: str) -> None:
    """All counts and hashes agree with it."""
    unit = unit_of(output)
    other = unit if name == "same" else f"{unit[:-1]}x"
    if other != unit:
        for path in sorted(output.glob(f"*/{unit}*")):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, path.with_name(path.name.replace(unit, other)))

    def edit(record: dict[str, Any]) -> None:
        record["units"] = [unit, other]
        for split, part in record["splits"].items():
            part |= {key: 2 * part[key] for key in ("documents", "tokens", "rows", "bytes", "shards")}
            index = output / split / "index.json"
            content = json.loads(index.read_text())
            content["shards"] += json.loads(json.dumps(content["shards"]).replace(unit, other))
            index.write_text(json.dumps(content))
            part["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()

    edit_record(output, edit)
    [fault] = verify(str(output), sources=False).faults
    assert fault.startswith("units/: ") and fault.endswith("text.parquet was converted twice")


def test_a_damaged_record_of_a_unit(output: Path) -> None:
    (output / "units" / f"{unit_of(output)}.json").write_text("{")
    [fault] = faults(output)
    assert fault.startswith(f"units/{unit_of(output)}.json: can't be read (")


def test_sources_that_changed(converted: Path, output: Path) -> None:
    text = converted.parent / "text.parquet"
    before = text.stat()
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert faults(output) == [f"source {text}: has changed since"]
    assert verify(str(output), sources=False).faults == []
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    text.rename(text.with_suffix(".away"))
    result = verify(str(output))
    assert result.faults == []
    assert result.summary[-1].startswith(f"sources: not compared (source {text}: there is no such file")
    text.with_suffix(".away").rename(text)


def test_an_unfinished_conversion_names_what_is_missing(output: Path) -> None:
    (output / "conversion.json").unlink()
    started = {"units": {unit: f"file {number}" for number, unit in enumerate("abcde")}}
    (output / "conversion.started").write_text(json.dumps(started))
    (output / "units" / "b.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"4 work units are missing \(file 0; file 2; file 3 and others\); run `biphasic convert`"
    ):
        verify(str(output))


def test_many_shards_are_read_by_several_processes(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((output / "train" / "index.json").read_text())["shards"][2]["samples"]
    monkeypatch.setattr(verifying, "_WORTH_PROCESSES", 3)
    shard = shard_of(output, 2)
    shard.write_bytes(shard.read_bytes()[:-1])
    result = verify(str(output))
    assert [fault.partition(":")[0] for fault in result.faults] == [f"train/{unit_of(output)}/shard.00002.mds.zstd"]
    total = row_count(str(output / "train"))
    assert result.summary[0] == f"train: {total - rows:,} of {total:,} rows were read without fault"
