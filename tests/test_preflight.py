"""Whether machines are fit for a run, output before it starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warm
from biphasic.preflight import find_faults, report
from buckets import bucket_for, flip_a_bit, upload
from conftest import Write


def preflight(path: Path, *overrides: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return warm.run([str(path), *overrides], processes, environment, module="biphasic.preflight")


def test_two_ranks_without_faults(s3: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "preflight")
    path = write_yaml("fit", checkpoint__folder=f"s3://{bucket}/runs/fit")
    local = path.parent / "data" / "train"
    remote = upload(local, bucket, "train")
    run = preflight(path, f"data.train={{local: {path.parent}/cache, remote: {remote}}}", processes=2)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    output = run.stdout
    assert "2 x CPU, " in output and "GB/s among them" in output and "no faults" in output
    assert f"s3://{bucket}/runs/fit: written, read and deleted in" in output
    assert "1 splits readable; tokenizer" in output and "free for" in output
    assert not (path.parent / "cache").exists()


def test_all_faults_are_reported(s3: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "preflight-faults")
    path = write_yaml("faults")
    remote = upload(path.parent / "data" / "train", bucket, "train")
    flip_a_bit(bucket, "train/shard.00000.mds.zstd")
    run = preflight(
        path,
        f"data.train={{local: {path.parent}/cache, remote: {remote}}}",
        "data.cache_limit=900tb",
        "checkpoint.folder=s3://no-such-bucket-here/x",
    )
    assert run.returncode == 2
    faults = [line for line in run.stdout.splitlines() if line.startswith("FAULT node 0 (")]
    assert len(faults) == 3
    assert "checkpoint.folder s3://no-such-bucket-here/x: can't be written, read and deleted (" in faults[0]
    assert "free, but the data's cache and two checkpoints need" in faults[1]
    assert f"shard {remote}/shard.00000.mds.zstd: is damaged" in faults[2]
    assert "Traceback" not in run.stdout + run.stderr


def rank(node: int, number: int, **changes: Any) -> dict[str, Any]:
    usual = {"host": f"node{node}", "node": node, "rank": number, "clock": 1000.0 + number / 1000, "faults": [],
             "device": "H100, 85 GB", "versions": "torch 2.7.0, CUDA 12.6", "node_bandwidth": 300.0,
             "bandwidth": 90.0}  # fmt: skip
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "A100, 42 GB"}, "node 2 (node2): device is A100, 42 GB, the others have H100, 85 GB"),
        ({"versions": "torch 2.6.0, CUDA 12.6"}, "node 2 (node2): versions is torch 2.6.0, CUDA 12.6, the others"),
        ({"clock": 1042.0}, "node 2 (node2): its clock differs from the others' by +42 s"),
        ({"node_bandwidth": 20.0}, "node 2: its ranks all-reduce among themselves at 20 GB/s, the median node at 300"),
        ({"faults": ["no bucket"]}, "node 2 (node2): no bucket"),
    ],
)  # fmt: skip
def test_a_differing_node_is_reported(changes: dict[str, Any], expected: str) -> None:
    all_facts = [rank(node, node, **(changes if node == 2 else {})) for node in range(4)]
    [fault] = find_faults(all_facts)
    assert fault.startswith(expected)
    lines = report(all_facts, [fault])
    assert f"FAULT {fault}" in lines and lines[-1] == "1 faults: nothing was started"


def test_equal_nodes_have_no_faults() -> None:
    assert find_faults([rank(node, node) for node in range(4)]) == []


def test_an_invalid_yaml(write_yaml: Write) -> None:
    run = preflight(write_yaml("wrong"), "optimizer.rl=1e-3")
    assert run.returncode == 2
    assert "optimizer.rl" in run.stderr and "lr" in run.stderr
