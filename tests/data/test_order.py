"""The order of rows, which does not depend on the machines, and each row of a validation once."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming.base import dataset as streaming_dataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from biphasic.config.data import DataConfig
from biphasic.data.epoch_order import own_rows, shuffled_rows
from biphasic.data.streaming import build_loader
from biphasic.errors import UserError
from helpers.numbered_rows import BATCH, data, global_batches, numbers, open_rows, write_numbered
from helpers.tiny import LENGTH, release_streaming


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits five seconds for each loader process whose iterator a garbage collection finds."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


def order(config: DataConfig, world: World, global_batch: int, *, start: int = 0) -> np.ndarray:
    """The rows of each global batch [batches, rows], in canonical order."""
    dataset = open_rows(config, global_batch // world.num_ranks).dataset
    batches = global_batches(dataset, world, global_batch, start)
    del dataset
    release_streaming()
    return batches


WORLDS = [(1, 1, 0), (1, 2, 2), (1, 8, 1), (2, 2, 2), (2, 4, 1), (4, 2, 1), (4, 1, 3)]
"""Nodes, ranks a node, workers a rank."""


@pytest.fixture(scope="module")
def numbered_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("numbered"), 1003)


def world(nodes: int, ranks: int, workers: int) -> World:
    return World(nodes, ranks, max(workers, 1), 0)


def test_the_order_does_not_depend_on_the_number_of_nodes(numbered_rows: Path) -> None:
    """With the defaults each global batch holds the same rows, whatever the ranks, and in the same canonical order."""
    rows, size = 1003, 16
    config = DataConfig.model_validate({"sequence_length": LENGTH, "train": {"local": str(numbered_rows)}})
    assert config.num_canonical_nodes == 64
    expected = order(config, world(*WORLDS[0]), size)
    # As Streaming fills each canonical node up to the longest one's rows, some are repeated at the end of the epoch.
    assert len(np.unique(expected)) > rows // size * size - config.num_canonical_nodes
    for shape in WORLDS[1:]:
        assert np.array_equal(order(config, world(*shape), size), expected), shape


@pytest.mark.parametrize("canonical", [1, 2, 64])
@pytest.mark.parametrize("shape", WORLDS)
def test_the_order_is_streaming_s(numbered_rows: Path, shape: tuple[int, int, int], canonical: int) -> None:
    """On all processes, from the first batch on and from the middle of an epoch."""
    machines, size = world(*shape), 16 // (shape[0] * shape[1])
    dataset = open_rows(data(numbered_rows, num_canonical_nodes=canonical), size).dataset
    dataset._set_shuffle_block_size(machines)
    for epoch, start in ((0, 0), (0, 8 * 16), (3, 16)):
        rows, batches = shuffled_rows(dataset, epoch), (1003 - start) // 16
        work = generate_work("random", dataset, machines, epoch, start)
        for number in range(machines.num_workers):
            place = World(shape[0], shape[1], machines.workers_per_rank, number)
            own = own_rows(rows, canonical, start, place, size, batches)
            expected = work[place.node, place.rank_of_node, place.worker_of_rank].flatten()
            assert len(own) >= len(expected) - 2 * size and np.array_equal(own, expected[: len(own)])


def test_a_part_of_a_validation_has_no_row_twice(tmp_path: Path) -> None:
    """1,000 of 1,003 rows end among those that 64 canonical nodes would repeat."""
    made = write_numbered(tmp_path / "made", 1003)
    config = data(made, num_canonical_nodes=64)
    for batches in (10, 120, 125):
        loader: Any = build_loader(config.reading, config.streams, BATCH, seed=3, train=False, batches=batches)
        read = numbers(itertools.islice(loader, batches))
        assert len(set(read)) == len(read) == batches * BATCH
        assert (max(read) > batches * BATCH) == (batches < 125)  # spread over the split
        release_streaming()


def test_fewer_rows_than_canonical_nodes_are_refused(tmp_path: Path) -> None:
    made = write_numbered(tmp_path / "made", 40)
    message = rf"^data\.num_canonical_nodes: expected at most the number of rows in an epoch of {made}, 40; got 64$"
    with pytest.raises(UserError, match=message):
        open_rows(data(made, num_canonical_nodes=64))
    assert sorted(numbers(open_rows(data(made, num_canonical_nodes=64), train=False))) == list(range(40))


@pytest.mark.parametrize("canonical", [2, 64])
def test_the_order_on_machines_that_do_not_divide_the_canonical_nodes(numbered_rows: Path, canonical: int) -> None:
    """Each global batch holds the same rows, from the first batch on and from the middle of an epoch."""
    rows, size, done = 1003, 48, 8
    config = data(numbered_rows, num_canonical_nodes=canonical)
    expected = order(config, world(1, 2, 1), size)
    for shape, start in itertools.product([(3, 2, 1), (6, 1, 2), (3, 8, 0), (4, 2, 2), (1, 3, 1)], [0, done]):
        own = order(config, world(*shape), size, start=start * size)
        assert len(own) == rows // size - start and np.array_equal(own, expected[start:]), (shape, start)


@pytest.mark.parametrize("shape", WORLDS)
def test_an_epoch_has_the_same_number_of_batches_on_any_machines(
    numbered_rows: Path, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 16
    machines = world(*shape)
    monkeypatch.setattr(streaming_dataset.World, "detect", classmethod(lambda _: machines))
    assert len(open_rows(data(numbered_rows), size // machines.num_ranks)) == 1003 // 16


@pytest.mark.parametrize("rows", [1003, 1008, 13])
@pytest.mark.parametrize("shape", WORLDS)
def test_a_validation_counts_each_row_once(rows: int, shape: tuple[int, int, int], tmp_path: Path) -> None:
    """Without the rows that Streaming repeats, so that each rank has the same number."""
    machines, size = world(*shape), 2
    dataset = open_rows(data(write_numbered(tmp_path, rows), num_canonical_nodes=1), size, train=False).dataset
    work = generate_work(dataset.batching_method, dataset, machines, 0, 0)
    nodes, ranks, workers, batches, _ = work.shape
    assert len({np.sum(work[node, rank] >= 0) for node in range(nodes) for rank in range(ranks)}) == 1
    counted = []
    for node, rank in itertools.product(range(nodes), range(ranks)):
        # A loader takes a batch from each of its workers in turn.
        own = work[node, rank].transpose(1, 0, 2).reshape(batches * workers * size)
        own = own[own >= 0]
        dataset._parallel_rank_world = World(nodes, ranks, 1, node * ranks + rank)
        repeated = torch.cat([dataset.are_repeated(at, 2) for at in range(0, len(own) + 1, 2)])[: len(own)]
        counted += own[~repeated.numpy()].tolist()
    assert sorted(counted) == list(range(rows))


def test_rows_are_read_on_three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_numbered(tmp_path / "made", 300)
    monkeypatch.setattr(streaming_dataset.World, "detect", classmethod(lambda _: world(3, 1, 1)))
    monkeypatch.setattr(streaming_dataset.World, "detect_workers", lambda self: self)
    for train in (True, False):
        assert len(numbers(open_rows(data(made, num_canonical_nodes=64), 4, train=train))) >= 96
        release_streaming()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_begins_in_the_middle_of_the_order(tmp_path: Path, workers: int) -> None:
    """700 rows are 87 batches; with 64 canonical nodes Streaming repeats 4 rows, which make another batch."""
    config = data(write_numbered(tmp_path / "rows", 700), num_canonical_nodes=64, num_workers=workers)
    whole = open_rows(config)
    epochs = [numbers(itertools.islice(whole, 87)) for _ in range(3)]
    for first in (80, 87 + 5):
        later = open_at(config, first)
        order = numbers(later) + numbers(later)
        assert order == [number for epoch in epochs for number in epoch][first * BATCH :][: len(order)]
        assert len(order) == (2 * 87 - first % 87) * BATCH
        # The same after a resume, which begins another epoch in the middle.
        later = open_at(config, first + 6)
        resumed = numbers(later) + numbers(later)
        assert resumed[: len(order) - 6 * BATCH] == order[6 * BATCH :][: len(resumed)]


def open_at(config: DataConfig, batch: int) -> Any:
    """A loader that begins at a batch of an order whose epochs have 87 batches."""
    batches: Any = build_loader(config.reading, config.streams, BATCH, seed=3, train=True)
    batches.dataset.start_at(batch // 87, batch % 87 * BATCH)
    return batches


def test_start_at_is_rounded_up_to_whole_batches(tmp_path: Path) -> None:
    for written, row in (
        ("0ba", 0),
        ("3ba", 24),
        ("24sp", 24),
        ("25sp", 32),
        (f"{24 * LENGTH}tok", 24),
        (f"{24 * LENGTH + 1}tok", 32),
    ):
        assert data(tmp_path, start_at=written).first_row(BATCH) == row
