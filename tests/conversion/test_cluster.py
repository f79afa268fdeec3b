"""A conversion on a Ray cluster that is already running, of two machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.convert import convert
from biphasic.errors import UserError
from outputs import same_bytes
from texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
STORE = 100 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
    ray_cluster = Cluster(initialize_head=True, head_node_args=head)
    ray_cluster.add_node(num_cpus=1, object_store_memory=STORE)
    ray_cluster.wait_for_nodes()
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text").mkdir()
    for number in range(4):
        write_parquet(tmp_path / "text" / f"{number}.parquet", sentences(2000, seed=number))
    return {"unit_bytes": 450_000, "shard_bytes": 1 << 16, "validation_fraction": 0.05}


def test_auto_without_a_cluster(keys: dict[str, Any], config_for: Make, tmp_path: Path) -> None:
    """Before the module's cluster starts."""
    with pytest.raises(UserError, match=r"^cluster.address auto: no Ray cluster can be reached \("):
        convert(config_for(tmp_path / "text", **keys, cluster={"address": "auto"}))


def test_two_machines_write_what_one_does(
    cluster: Any, keys: dict[str, Any], config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = {"address": cluster.address}
    with pytest.raises(UserError, match=r"a folder of one machine, and the cluster has 2: name a bucket, or set"):
        convert(config_for(tmp_path / "text", **keys, cluster=address))
    shared = {**address, "shared_folder": True}
    record = convert(config_for(tmp_path / "text", **keys, cluster=shared))
    assert len(record["units"]) == 4
    convert(config_for(tmp_path / "text", **keys, cluster={"workers": 1}, output=str(tmp_path / "alone")))
    assert same_bytes(tmp_path / "out", tmp_path / "alone")


def test_a_leaving_machine_s_units_are_converted_by_another(
    cluster: Any, keys: dict[str, Any], config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves while it converts units: every CPU of the cluster is in use, one of them its own."""
    for number in range(4, 10):
        write_parquet(tmp_path / "text" / f"{number}.parquet", sentences(2000, seed=number))
    leaving = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    address = {"address": cluster.address, "shared_folder": True, "workers": 3}
    converted = threading.Event()

    def leave() -> None:
        while not (list((tmp_path / "out").glob("train/*/*")) and ray.available_resources().get("CPU", 0) == 0):
            if converted.wait(0.05):
                return
        cluster.remove_node(leaving, allow_graceful=False)

    thread = threading.Thread(target=leave)
    thread.start()
    convert(config_for(tmp_path / "text", **keys, cluster=address))
    converted.set()
    thread.join()
    assert "its worker died; the work unit is given to another one" in capsys.readouterr().out
    convert(config_for(tmp_path / "text", **keys, cluster={"workers": 1}, output=str(tmp_path / "alone")))
    assert same_bytes(tmp_path / "out", tmp_path / "alone")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "head"])
def test_no_cluster(keys: dict[str, Any], config_for: Make, tmp_path: Path, address: str) -> None:
    with pytest.raises(UserError, match=rf"^cluster.address {address}: no Ray cluster can be reached \("):
        convert(config_for(tmp_path / "text", **keys, cluster={"address": address}))
