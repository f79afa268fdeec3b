"""Two nodes: two launchers, of which one is killed. Both are started again, and the run comes back."""

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
from s3_server import free_port
from tiny import ROOT, composer_command, config_of, launch, losses, weights


def node(number: int, port: int, path: Path) -> subprocess.Popen[str]:
    place = ["--world_size", "2", "--node_rank", str(number), "--base_rank", str(number)]
    meet = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    # And shared memory of its own.
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    # Each has its own copy of the data, as on two machines.
    local = f"data.train.local={path.parent}/node{number}"
    command = composer_command(*place, *meet, ROOT / "src" / "main.py", path, local)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([*alone, *command], env=environment, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="two nodes on one machine need a mount namespace each: run as root")
def test_one_of_two_nodes_is_killed(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"max_duration": "60ba", "checkpoint__interval": "5ba", "parallelism__strategy": "fsdp"}
    path = write_yaml("whole", **keys)
    for number in range(2):
        subprocess.run(["cp", "-r", path.parent / "data" / "train", path.parent / f"node{number}"], check=True)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(path).output)
    path = write_yaml("nodes", **keys)
    folder, port = runs / "nodes", free_port()
    both = [node(number, port, path) for number in range(2)]
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "ba10.json").exists():
        ended = [one.communicate()[0] for one in both if one.poll() is not None]
        assert time.monotonic() < deadline and not ended, ended
        time.sleep(0.01)
    os.killpg(both[1].pid, signal.SIGKILL)
    # The other one doesn't wait for ever.
    said = both[0].communicate(timeout=60)[0]
    assert both[0].returncode == 1, said[-3000:]
    assert "another rank ended in the middle of a step" in said
    both = [node(number, port, path) for number in range(2)]
    for one in both:
        said = one.communicate(timeout=180)[0]
        assert one.returncode == 0, said[-3000:]
    assert losses(folder) == losses(runs / "whole")
    ours, theirs = weights(folder, 60), weights(runs / "whole", 60)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
