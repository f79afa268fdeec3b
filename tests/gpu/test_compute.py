"""On a GPU: a compiled run, and the automatic microbatch."""

import json
import math
from typing import Any

import pytest
import torch

from biphasic.model.auto_microbatch import available_bytes, largest_microbatch, peak_bytes
from biphasic.training.compute import MICROBATCH_FILE
from conftest import Write
from helpers.tiny import LENGTH, config_of, train
from helpers.tiny import losses as losses_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("packing", ["varlen", "flex"])
def test_a_compiled_run_is_the_same_run(write_yaml: Write, packing: str) -> None:
    from torch._dynamo.utils import counters

    # FlexAttention needs heads of at least 16.
    heads: dict[str, Any] = {"model__num_heads": 2, "model__num_kv_heads": 1}
    keys: dict[str, Any] = {"precision": "amp_bf16", "checkpoint__interval": "100ba", **heads}
    plain = losses_of(train(config_of(write_yaml("plain", **keys, compute={"compile": False, "attention": "sdpa"}))))
    torch._dynamo.reset()
    counters.clear()
    compiled = losses_of(train(config_of(write_yaml("compiled", **keys, compute={"attention": packing}))))
    assert all(math.isclose(one, other, abs_tol=3e-2) for one, other in zip(plain, compiled, strict=True))
    # A layer in either phase, the final norm, the loss.
    assert counters["stats"]["unique_graphs"] == 4


def test_the_automatic_microbatch_is_stored_and_fits(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"microbatch_size": "auto", "checkpoint__interval": "100ba", "compute": {"compile": False}}
    path = write_yaml("auto", **keys)
    folder = train(config_of(path))
    assert json.loads((folder / "checkpoints" / MICROBATCH_FILE.format(length=LENGTH)).read_text())["rows"] == 8
    assert len(losses_of(folder)) == 12


def test_the_largest_microbatch_that_fits() -> None:
    """A row takes a gigabyte, so that a few more rows would not fit."""

    def measure(rows: int) -> float | None:
        return peak_bytes(lambda: torch.empty(rows << 30, dtype=torch.uint8, device=DEVICE))

    room = available_bytes()
    rows = largest_microbatch(measure, 10_000, room)
    assert 0.9 * room <= rows << 30 <= room


def test_batches_are_pinned(write_yaml: Write) -> None:
    from biphasic.data.streaming import build_loader

    config = config_of(write_yaml())
    batches = build_loader(config.data.reading, config.data.streams, 4, seed=1, train=True)
    batch = next(iter(batches))
    assert batch["input_ids"].is_pinned() and batch["segment_ids"].is_pinned()
