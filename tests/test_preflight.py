"""Whether machines are fit for a run, output before it starts."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.plan import plan
from biphasic.errors import UserError
from biphasic.preflight import check, disk_needs, find_faults, rank_facts, report
from biphasic.storage import LocalStore
from conftest import MakeBucket, Write
from helpers import warm
from helpers.buckets import bucket_for, flip_a_bit, upload, upload_to
from helpers.tiny import config_of


def preflight(path: Path, *overrides: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return warm.run(["preflight", str(path), *overrides], processes, environment, module="biphasic")


def test_two_ranks_without_faults(use_store: Callable[[str], MakeBucket], write_yaml: Write) -> None:
    bucket = use_store("moto")("preflight")
    path = write_yaml("fit", checkpoint__folder=f"{bucket}/runs/fit")
    remote = upload_to(path.parent / "data" / "train", f"{bucket}/train")
    run = preflight(path, f"data.train={{local: {path.parent}/cache, remote: {remote}}}", processes=2)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    output = run.stdout
    assert "2 x CPU, " in output and "GB/s among them" in output and "no faults" in output
    assert f"{bucket}/runs/fit: written, read and deleted in" in output
    assert "1 splits readable; tokenizer" in output and "free for" in output
    assert re.search(r"^    /dev/shm: \S+ \w+ free for \S+ \w+$", output, re.M)
    assert not (path.parent / "cache").exists()


def test_all_faults_are_reported(s3: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "preflight-faults")
    path = write_yaml("faults")
    remote = upload(path.parent / "data" / "train", bucket, "train")
    flip_a_bit(bucket, "train/shard.00000.mds.zstd")
    run = preflight(
        path,
        f"data.train={{local: {path.parent}/cache, remote: {remote}}}",
        "model.vocab_size=9_000_000_000_000",  # checkpoints of petabytes
        "checkpoint.folder=s3://no-such-bucket-here/x",
    )
    assert run.returncode == 2
    faults = [line for line in run.stdout.splitlines() if line.startswith("FAULT node 0 (")]
    assert len(faults) == 3 and "3 faults: nothing was started" in run.stdout
    assert "checkpoint.folder s3://no-such-bucket-here/x: can't be written, read and deleted (" in faults[0]
    assert "free, but the data's cache and the checkpoints need" in faults[1]
    assert f"shard {remote}/shard.00000.mds.zstd: is damaged" in faults[2]
    assert "Traceback" not in run.stdout + run.stderr


def test_nodes_share_a_folder_of_checkpoints(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node checks it at the same moment, and removes it once it is empty."""
    config, remove = config_of(write_yaml("shared")), LocalStore.remove

    def remove_with_folder(store: LocalStore, names: Iterable[str]) -> None:
        remove(store, names)
        with suppress(FileNotFoundError):
            Path(store.root).rmdir()

    monkeypatch.setattr(LocalStore, "remove", remove_with_folder)
    facts = rank_facts(config)
    assert facts["faults"] == [] and "written, read and deleted in" in facts["bucket"]


def test_disk_needs_of_a_run(write_yaml: Write, tmp_path: Path) -> None:
    """Two phases, 12 batches, a checkpoint each: the decay starts at 8, the switch is at 6."""
    path = write_yaml("needs")
    each, folder = 12 * config_parameters(path), tmp_path / "runs" / "needs" / "checkpoints"
    train, cache = tmp_path / "data" / "train", tmp_path / "cache"
    unpacked = sum(shard["raw_data"]["bytes"] for shard in json.loads((train / "index.json").read_text())["shards"])
    remote = {"data.train": f"{{local: {cache}, remote: {train}}}"}
    # The data is no cache; all 12 checkpoints are kept.
    assert disk_needs(config_of(path)) == [(folder, 12 * each)]
    # The newest two, the switch, the decay's start, and the one that is written.
    assert disk_needs(config_of(path, **{"checkpoint.keep": 2})) == [(folder, 5 * each)]
    kept = config_of(path, **{"checkpoint.keep": 2, "checkpoint.keep_at": "[2ba,3ba]"})
    assert disk_needs(kept) == [(folder, 7 * each)]
    # A cache takes its dataset's size, or the limit if that is smaller.
    assert disk_needs(config_of(path, **remote))[0] == (cache, unpacked)
    assert disk_needs(config_of(path, **remote, **{"data.cache_limit": "1tb"}))[0] == (cache, unpacked)
    assert disk_needs(config_of(path, **remote, **{"data.cache_limit": "1000b"}))[0] == (cache, 1000)
    # A run that saves to a bucket has the newest and the one that is written on its disk.
    assert disk_needs(config_of(path, **{"checkpoint.folder": "s3://bucket/needs"})) == [(folder, 2 * each)]
    # What is stored already is subtracted.
    folder.mkdir(parents=True)
    (folder / "ba3-rank0.pt").write_bytes(bytes(each))
    assert disk_needs(config_of(path, **{"checkpoint.keep": 2})) == [(folder, 4 * each)]


def config_parameters(path: Path) -> int:
    parameters = plan(config_of(path), 1).details["parameters"]
    assert parameters is not None
    return parameters["total"]


def rank(node: int, number: int, **changes: Any) -> dict[str, Any]:
    usual = {"host": f"node{node}", "node": node, "faults": [],
             "device": "H100, 85 GB", "versions": "torch 2.7.0, CUDA 12.6", "node_bandwidth": 300.0,
             "bandwidth": 90.0}  # fmt: skip
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "A100, 42 GB"}, "node 2 (node2): device is A100, 42 GB, the others have H100, 85 GB"),
        ({"versions": "torch 2.6.0, CUDA 12.6"}, "node 2 (node2): versions is torch 2.6.0, CUDA 12.6, the others"),
        ({"node_bandwidth": 20.0}, "node 2 (node2): its ranks all-reduce among themselves at 20 GB/s, the median"),
        ({"faults": ["no bucket"]}, "node 2 (node2): no bucket"),
    ],
)  # fmt: skip
def test_a_differing_node_is_reported(changes: dict[str, Any], expected: str) -> None:
    all_facts = [rank(node, node, **(changes if node == 2 else {})) for node in range(4)]
    [fault] = find_faults(all_facts)
    assert fault.startswith(expected)
    lines = report(all_facts, [fault])
    assert f"FAULT {fault}" in lines and lines[-1] == "1 fault: nothing was started"


def test_equal_nodes_have_no_faults() -> None:
    assert find_faults([rank(node, node) for node in range(4)]) == []


@pytest.mark.parametrize(
    ("address", "variables", "refused"),
    [
        ("127.0.1.1", {}, True),  # Debian's /etc/hosts
        (None, {}, True),  # the name doesn't resolve: gloo takes the loopback address
        ("10.0.0.5", {}, False),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
        ("127.0.1.1", {"WORLD_SIZE": "2"}, False),  # one node
        ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}, False),  # several on one machine
    ],
)
def test_a_name_that_other_nodes_cannot_reach(
    address: str | None,
    variables: dict[str, str],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    write_yaml: Write,
) -> None:
    addresses = {"this": address, "first": "10.0.0.4", "127.0.0.1": "127.0.0.1"}

    def look_up(host: str, port: None) -> list[Any]:
        if addresses[host] is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "this")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "first", **variables}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    # What comes after the check would wait for the other ranks.
    monkeypatch.setattr("biphasic.preflight.rank_facts", lambda config: 1 / 0)
    with pytest.raises(UserError if refused else ZeroDivisionError) as raised:
        check(config_of(write_yaml()))
    assert ("set GLOO_SOCKET_IFNAME to the network interface" in str(raised.value)) == refused


def test_an_invalid_yaml(write_yaml: Write) -> None:
    run = preflight(write_yaml("wrong"), "optimizer.rl=1e-3")
    assert run.returncode == 2
    assert "optimizer.rl" in run.stderr and "lr" in run.stderr
