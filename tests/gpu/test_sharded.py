"""What only GPUs can show: HSDP, bf16, states staged in pinned memory."""

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Write
from helpers.tiny import ROOT, composer_command, config_of, keep_checkpoints_up_to, losses, weights

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
one = pytest.mark.skipif(GPUS < 1, reason="no GPU")
two = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, there are {GPUS}")


def run(path: Path, processes: int, *overrides: str) -> None:
    command = composer_command(ROOT / "src" / "main.py", path, *overrides, processes=processes)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@one
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_a_resume_on_one_gpu_is_the_same_run(write_yaml: Write, precision: str) -> None:
    path = write_yaml("whole", precision=precision, compute__deterministic=True)
    run(path, 1)
    whole = Path(config_of(path).output) / "whole"
    again = whole.parent / "again"
    shutil.copytree(whole, again)
    keep_checkpoints_up_to(again, 5)
    (again / "metrics.jsonl").unlink()
    run(path, 1, "run_name=again")
    assert losses(again) == losses(whole)[5:]
    result, reference = weights(again, 12), weights(whole, 12)
    assert all(torch.equal(weight, reference[name]) for name, weight in result.items())


@two
@pytest.mark.parametrize("degree", ["all", 1])
def test_every_way_to_shard_is_the_same_run(write_yaml: Write, degree: Any) -> None:
    keys: dict[str, Any] = {"data__num_canonical_nodes": 4}
    run(write_yaml("ddp", **keys, parallelism__strategy="ddp"), 2)
    sharded = {"strategy": "fsdp", "shard_degree": degree}
    path = write_yaml("sharded", **keys, parallelism=sharded)
    run(path, 2)
    runs = Path(config_of(path).output)
    pairs = zip(losses(runs / "sharded"), losses(runs / "ddp"), strict=True)
    assert all(math.isclose(result, reference, abs_tol=1e-4) for result, reference in pairs)
