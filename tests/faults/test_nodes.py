"""Two nodes, of which one is killed: the other one ends, both are started again, and the run is the same run."""

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


SHORT_LOOK = "from biphasic.checkpointing import rank_group; rank_group._SHARED_SECONDS = 1.0"


def start_nodes(path: Path, *overrides: str, module: str = "main") -> list[subprocess.CompletedProcess[str]]:
    """Run it on two nodes of one rank. `NODE` in an override is the node's number."""
    port, jobs = free_port(), list[warm.Job]()
    command = [str(path)] if module == "main" else ["preflight", str(path)]
    for number in range(2):
        place = {"RANK": str(number), "NODE_RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        arguments = [*command, *(override.replace("NODE", str(number)) for override in overrides)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        jobs.append(warm.start(arguments, 1, environment, code=SHORT_LOOK, place=place, module=module))
    return [job.wait(120) for job in jobs]


def test_nodes_whose_checkpoints_are_on_disks_of_their_own_are_refused(write_yaml: Write, tmp_path: Path) -> None:
    path, output = write_yaml("apart", parallelism__strategy="fsdp"), f"output={tmp_path}/disk-NODE"
    message = f"checkpoint.folder {tmp_path}/disk-0/apart/checkpoints: node 1 ("
    first, second = start_nodes(path, output)
    assert first.returncode == second.returncode == 2
    assert message in first.stderr and "doesn't see the files of node 0 there" in first.stderr
    assert not list((tmp_path / "disk-0" / "apart" / "checkpoints").iterdir())
    first, second = start_nodes(path, output, module="biphasic")
    assert first.returncode == second.returncode == 2
    assert f"): {message}" in first.stdout and "1 fault: nothing was started" in first.stdout


def test_nodes_that_share_a_cache_of_shards_are_refused(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml("cache")
    data = f"data.train={{local: {tmp_path}/cacheNODE/train, remote: {tmp_path}/data/train}}"
    first, second = start_nodes(path, data.replace("NODE", ""))
    assert first.returncode == second.returncode == 2
    message = f"data.cache (data.train.local {tmp_path}/cache/train): node 1 ("
    assert message in first.stderr and "such as data.cache=/tmp/shards" in first.stderr
    assert not list((tmp_path / "cache" / "train").iterdir())
    # A folder of checkpoints that both see, and a cache for each.
    first, second = start_nodes(path, data, module="biphasic")
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr[-3000:]
