"""An interrupted run is the same run, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from conftest import Write
from tiny import config_of, keep_checkpoints_up_to, launch, losses, train, weights

SWITCH, LAST = 6, 12


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert torch.equal(weight, b[name]), name


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process(write_yaml: Write, workers: int) -> None:
    whole = train(config_of(write_yaml("whole", data__num_workers=workers)))
    expected = losses(whole)
    assert len(expected) == LAST
    for batch in (SWITCH - 1, SWITCH, SWITCH + 1, 10):
        name = f"from{batch}"
        config = config_of(write_yaml(name, data__num_workers=workers))
        folder = Path(config.output) / name
        shutil.copytree(whole, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        train(config)
        assert losses(folder) == expected[batch:]
        assert_same_weights(weights(folder, LAST), weights(whole, LAST))


def test_two_ranks_with_fsdp2(write_yaml: Write) -> None:
    path = write_yaml("whole", parallelism__strategy="fsdp", data__num_workers=1)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    whole = Path(config_of(path).output) / "whole"
    expected = losses(whole)
    assert len(expected) == LAST
    for batch in (SWITCH - 1, SWITCH, SWITCH + 1):
        folder = whole.parent / f"from{batch}"
        shutil.copytree(whole, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        run = launch(path, f"run_name=from{batch}", processes=2)
        assert run.returncode == 0, run.stderr[-3000:]
        assert losses(folder) == expected[batch:]
        assert_same_weights(weights(folder, LAST), weights(whole, LAST))
