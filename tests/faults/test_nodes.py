"""Two nodes, of which one is killed: the other one ends, both are started again, and the run is the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Write
from helpers import warm
from helpers.chain_faults import OWN_SHARED_MEMORY
from helpers.ports import free_port
from helpers.tiny import config_of, launch, losses, weights


def start_node(number: int, port: int, path: Path) -> warm.Job:
    place = {"RANK": str(number), "NODE_RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Each node has its own copy of the data.
    arguments = [str(path), f"data.train.local={path.parent}/node{number}"]
    return warm.start(arguments, 1, environment, setup=OWN_SHARED_MEMORY, place=place)


@pytest.mark.skipif(os.geteuid() != 0, reason="two nodes on one machine need a mount namespace each: run as root")
def test_a_killed_node_ends_the_others_and_the_run_resumes(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"max_duration": "24ba", "checkpoint__interval": "4ba", "parallelism__strategy": "fsdp"}
    path = write_yaml("uninterrupted", **keys)
    for number in range(2):
        subprocess.run(["cp", "-r", path.parent / "data" / "train", path.parent / f"node{number}"], check=True)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(path).output)
    path = write_yaml("nodes", **keys)
    folder, port = runs / "nodes", free_port()
    nodes = [start_node(number, port, path) for number in range(2)]
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "ba8.json").exists():
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), [
            node.wait() for node in nodes if node.poll() is not None
        ]
        time.sleep(0.01)
    os.killpg(nodes[1].pid, signal.SIGKILL)
    # The other node does not wait forever.
    run = nodes[0].wait(60)
    assert run.returncode == 1, run.stderr[-3000:]
    assert "another rank, or its machine, ended in the middle of a step" in run.stderr
    nodes = [start_node(number, port, path) for number in range(2)]
    for node in nodes:
        run = node.wait(180)
        assert run.returncode == 0, run.stderr[-3000:]
    assert losses(folder) == losses(runs / "uninterrupted")
    expected = weights(runs / "uninterrupted", 24)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(folder, 24).items())
