"""Mixes of datasets: proportions, row ids, order."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.batching import generate_work
from streaming.base.world import World
from torch import Tensor

from biphasic.config.conversion_checks import conversion_record
from biphasic.config.data import DataConfig
from biphasic.data.streaming import build_loader
from biphasic.data.streams import read_conversions
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.objectives import targets as mlm
from conftest import Write
from helpers.buckets import bucket_for, flip_a_bit, upload
from helpers.numbered_rows import global_batches
from helpers.tiny import LENGTH, config_of, losses, release_streaming, train


@pytest.fixture(autouse=True)
def free_shared_memory() -> Iterator[None]:
    yield
    gc.collect()


def write(folder: Path, rows: int, first: int, dtype: str = "uint16", length: int = LENGTH) -> str:
    """Rows whose tokens are all the row's number, from `first`."""
    columns = {"tokens": f"ndarray:{dtype}:{length}", "lengths": "ndarray:uint32"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], compression="zstd", size_limit=2000) as out:
        for number in range(first, first + rows):
            out.write({"tokens": np.full(length, number, dtype), "lengths": np.array([length], np.uint32)})
    return str(folder)


def mixed(folders: dict[str, tuple[str, float]], **keys: Any) -> DataConfig:
    streams = {name: {"local": folder, "proportion": share} for name, (folder, share) in folders.items()}
    defaults = {"num_workers": 0, "num_canonical_nodes": 4, "shuffle_block_size": 64}
    return DataConfig.model_validate({"sequence_length": LENGTH, "mix": streams, **defaults, **keys})


def epoch(config: DataConfig, batch_size: int = 8) -> list[tuple[int, int]]:
    """(id, number) of each row."""
    batches: Any = build_loader(config.reading, config.streams, batch_size, seed=3, train=True)
    return [
        (int(row), int(number))
        for batch in batches
        for row, number in zip(batch["row_ids"], batch["input_ids"][:, 0], strict=True)
    ]


def test_a_mix_has_its_proportions_and_unique_row_ids(tmp_path: Path) -> None:
    """Code, with 100 rows, gives 200 of 1,000; its ids come first, since names are in order."""
    config = mixed(
        {
            "web": (write(tmp_path / "web", 1000, first=1000), 0.8),
            "code": (write(tmp_path / "code", 100, first=5000, dtype="uint32"), 0.2),
        },
        epoch_rows=1000,
    )
    rows = epoch(config)
    assert len(rows) == 1000
    code = [number for _, number in rows if number >= 5000]
    assert len(code) == 200 and sorted(code) == sorted(2 * list(range(5000, 5100)))
    web = [number for _, number in rows if number < 5000]
    assert len(set(web)) == len(web) == 800
    assert all(row == (number - 5000 if number >= 5000 else number - 1000 + 100) for row, number in rows)
    # Spread over the epoch's quarters, not one dataset after the other.
    for at in range(0, 1000, 250):
        assert 25 <= sum(number >= 5000 for _, number in rows[at : at + 250]) <= 75


def test_an_epoch_has_by_default_the_rows_of_all_datasets(tmp_path: Path) -> None:
    folders = {"a": (write(tmp_path / "a", 120, first=0), 0.5), "b": (write(tmp_path / "b", 40, first=1000), 0.5)}
    rows = epoch(mixed(folders))
    assert len(rows) == 160
    assert sum(number >= 1000 for _, number in rows) == 80
    backwards = mixed(dict(reversed(folders.items())))
    gc.collect()
    assert epoch(backwards) == rows


@pytest.mark.parametrize("done", [0, 12])
def test_the_order_of_a_mix_does_not_depend_on_the_nodes(tmp_path: Path, done: int) -> None:
    folders = {"a": (write(tmp_path / "a", 300, first=0), 0.7), "b": (write(tmp_path / "b", 90, first=1000), 0.3)}
    config, size, orders = mixed(folders, epoch_rows=480), 16, []
    for nodes, ranks in ((1, 1), (1, 2), (2, 2), (4, 1)):
        batches: Any = build_loader(config.reading, config.streams, size // nodes // ranks, seed=3, train=True)
        dataset, world = batches.dataset, World(nodes, ranks, 1, 0)
        orders.append(global_batches(dataset, world, size, done * size))
        work = generate_work("random", dataset, world, 0, done * size)
        assert np.array_equal(orders[-1], work.transpose(3, 2, 4, 1, 0).reshape(-1, size))
        del batches, dataset
        release_streaming()
    assert orders[0].shape == (480 // size - done, size)
    assert all(np.array_equal(order, orders[0]) for order in orders[1:])


def test_a_stream_of_another_length_is_named(tmp_path: Path) -> None:
    folders = {
        "a": (write(tmp_path / "a", 30, first=0), 0.5),
        "b": (write(tmp_path / "b", 30, first=0, length=2 * LENGTH), 0.5),
    }
    with pytest.raises(UserError, match=r"data\.sequence_length is 32, but the rows of data\.mix\.b in .* have 64"):
        epoch(mixed(folders))


def test_a_damaged_shard_of_a_mix_is_named(s3: Path, tmp_path: Path) -> None:
    bucket = bucket_for(s3, "mix")
    remote = upload(Path(write(tmp_path / "b", 40, first=0)), bucket, "b/train")
    flip_a_bit(bucket, "b/train/shard.00001.mds.zstd")
    config = mixed({"a": (write(tmp_path / "a", 120, first=0), 0.5), "b": (str(tmp_path / "cache"), 0.5)})
    assert config.mix is not None
    config.mix["b"] = config.mix["b"].model_copy(update={"remote": remote})
    with pytest.raises(UserError, match=rf"^shard {remote}/shard\.00001\.mds\.zstd: is damaged"):
        epoch(config)


def write_record(folder: Path, folder_of_tokenizer: Path, **changes: Any) -> None:
    record = {
        "config": {"source": {"paths": ["x"]}},
        "tokenizer": {"sha256": load_tokenizer(str(folder_of_tokenizer)).sha256},
        "sequence_length": LENGTH,
        "splits": {"train": {"rows": 10, "tokens": 300, "documents": 5}},
        **changes,
    }
    (folder / "conversion.json").write_text(json.dumps(record))


def test_every_stream_must_fit_the_tokenizer(s3: Path, tmp_path: Path, write_yaml: Write) -> None:
    """One record is in a folder, the other in a bucket."""
    bucket = bucket_for(s3, "records")
    path = write_yaml()
    (tmp_path / "code").mkdir()
    tokenizer = tmp_path / "data" / "tokenizer"
    write_record(tmp_path / "data", tokenizer)
    mix = {
        "web": {"local": str(tmp_path / "data" / "train"), "proportion": 0.75},
        "code": {"local": str(tmp_path / "c"), "remote": f"s3://{bucket}/code/train", "proportion": 0.25},
    }
    path = write_yaml(data__train=None, data__mix=mix)
    config, loaded = config_of(path), load_tokenizer(str(tokenizer))
    for changes, message in (
        (
            {"tokenizer": {"sha256": "0" * 64}},
            rf"the one that data\.mix\.code, s3://{bucket}/code, was converted with",
        ),
        (
            {"sequence_length": 64},
            rf"but data\.mix\.code, s3://{bucket}/code, was converted with sequence_length: 64",
        ),
    ):
        write_record(tmp_path / "code", tokenizer, **changes)
        upload(tmp_path / "code", bucket, "code")
        with pytest.raises(UserError, match=message):
            conversion_record(config, loaded, read_conversions(config.streams))
    write_record(tmp_path / "code", tokenizer)
    upload(tmp_path / "code", bucket, "code")
    record = conversion_record(config, loaded, read_conversions(config.streams))
    assert record["source"] == "a mix of code (0.25), web (0.75)"
    assert (record["tokens"], record["rows"], record["documents"]) == (600, 20, 10)


def test_a_tiny_run_over_a_mix(tmp_path: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the rows of `b` several times, in each batch with another mask."""
    write_yaml()
    mix = {
        "a": {"local": str(tmp_path / "data" / "train"), "proportion": 0.5},
        "b": {"local": write(tmp_path / "b", 12, first=4), "proportion": 0.5},
    }
    masks: dict[int, list[tuple[bool, ...]]] = {}

    original = mlm.mlm_inputs_and_targets

    def mask(tokens: Tensor, segment_ids: Tensor, row_ids: Tensor, *rest: Any, **keys: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = original(tokens, segment_ids, row_ids, *rest, **keys)
        for row, selected in dict(zip(row_ids.tolist(), (targets >= 0).tolist(), strict=True)).items():
            masks.setdefault(row, []).append(tuple(selected))
        return inputs, targets

    monkeypatch.setattr(mlm, "mlm_inputs_and_targets", mask)
    only_mlm = {"objective__phases": [{"name": "mlm"}], "checkpoint__interval": "100ba"}
    path = write_yaml("mixed", data__train=None, data__mix=mix, data__epoch_rows=400, **only_mlm)
    assert len(losses(train(config_of(path)))) == 12
    assert max(len(of_row) for of_row in masks.values()) > 3
    assert all(len(set(of_row)) == len(of_row) for of_row in masks.values())

    # A run that begins in a later epoch has that epoch's masks.
    short = {**only_mlm, "schedule": {}}

    def masks_of(start: str, length: str) -> dict[int, list[tuple[bool, ...]]]:
        masks.clear()
        train(config_of(write_yaml(start, data__start_at=start, max_duration=length, **short)))
        return dict(masks)

    later, whole = masks_of("87ba", "2ba"), masks_of("0ba", "89ba")
    assert len(later) == 16 and all(whole[row][-1:] == of_row for row, of_row in later.items())
