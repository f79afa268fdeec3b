"""Workers, a conversion and a sweep on a Ray cluster that is already running, of two machines."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from biphasic.config.base import ClusterConfig
from biphasic.config.convert import ConvertConfig
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.conversion.convert import convert
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.sweep.records import read_grid, read_records
from biphasic.sweep.run import run
from biphasic.workers import open_workers
from helpers.outputs import same_bytes
from helpers.small_trials import read_log
from helpers.texts import sentences, write_parquet
from helpers.worker_objects import check_group

Make = Callable[..., ConvertConfig]
STORE = 100 * 2**20
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
    with pytest.MonkeyPatch.context() as patch:
        # Workers import this folder's modules by name.
        patch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
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


def test_auto_without_a_cluster(
    keys: dict[str, Any], config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the module's cluster starts. Clusters of other programs on this machine are hidden from Ray."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services._cached_find_gcs_addresses", cache(set))
    with pytest.raises(UserError, match=r"^cluster.address auto: no Ray cluster can be reached \("):
        convert(config_for(tmp_path / "text", **keys, cluster={"address": "auto"}))


def test_values_errors_reports_and_a_killed_worker(cluster: Any, tmp_path: Path) -> None:
    section = ClusterConfig(address=cluster.address)
    with open_workers(section, [str(tmp_path)], {"OF_WORKERS": "yes"}, ()) as group:
        assert (group.cpus, group.gpus) == (2, 0)
        check_group(group, tmp_path)


def test_a_sweep_on_two_machines(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model kills its worker once, one breaks its GPU twice, one fails, one trains."""
    workers_paths: list[str] = []

    def opened(section: ClusterConfig, paths: list[str], *others: Any) -> Any:
        workers_paths.extend(paths)
        return open_workers(section, paths, *others)

    monkeypatch.setattr("biphasic.sweep.workers.open_group", opened)
    log = tmp_path / "log"
    models = {
        "good": {"do": "train"},
        "bad": {"do": "fail"},
        "dies": {"do": "die", "times": 1},
        "breaks": {"do": "break", "times": 2},
    }
    for name, content in models.items():
        (tmp_path / name).write_text(json.dumps({**content, "log": str(log)}))
    task = {"kind": "classification", "name": "sst2", "data": str(tmp_path / "data")}
    content = {"job": "finetune", "run_name": "sst2", "model": {"path": "none"}, "task": task}
    (tmp_path / "sst2.yaml").write_text(yaml.safe_dump(content))
    sweep = {"job": "sweep", "output": str(tmp_path / "out"), "learning_rates": [1e-5], "seeds": [0],
             "models": {name: {"path": str(tmp_path / name)} for name in models},
             "tasks": {"sst2": str(tmp_path / "sst2.yaml")},
             "cluster": {"address": cluster.address}}  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    config = load(tmp_path / "sweep.yaml")
    assert isinstance(config, SweepConfig)
    assert run(config, module="helpers.small_trials") == 1
    assert workers_paths == [str(tmp_path / name) for name in ("out", "bad", "breaks", "dies", "good")]
    folder = open_store(config.output)
    records = {record.cell.model: record for record in read_records(folder, read_grid(folder).trials).values()}
    assert {model: record.status for model, record in records.items()} == {
        "good": "done",
        "bad": "failed",
        "dies": "done",
        "breaks": "done",
    }
    assert records["bad"].error == "ValueError: no such luck"
    assert records["dies"].about["attempt"] == 1
    assert records["good"].about["threads"] == [1, "1", "1", "false"]
    assert Counter(read_log(log, "trained")) == {f"sst2-{name}-1e-05-0": 1 for name in models if name != "bad"}
    assert "dies lr 1e-05 seed 0: its worker died; another worker runs the trial" in capsys.readouterr().out


def test_two_machines_write_what_one_does(
    cluster: Any, keys: dict[str, Any], config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are those of the command's folder, not of the folder of `ray start`."""
    monkeypatch.chdir(tmp_path)
    workers_paths: list[list[str]] = []

    def opened(section: ClusterConfig, paths: Any, *others: Any) -> Any:
        workers_paths.append(list(paths))
        return open_workers(section, workers_paths[-1], *others)

    monkeypatch.setattr("biphasic.conversion.pool.open_workers", opened)
    address = {"address": cluster.address}
    with (
        pytest.raises(UserError, match=r"^text/9.parquet: is not there on .*: name a bucket, or a folder that all"),
        open_workers(ClusterConfig(**address), ["s3://bucket/out", "text/9.parquet"], {}, ()),
    ):
        pass
    record = convert(config_for("text", **keys, cluster=address, output="out"))
    assert workers_paths == [["out", *(f"text/{number}.parquet" for number in range(4))]]
    assert len(record["units"]) == 4
    convert(config_for("text", **keys, cluster={"workers": 1}, output="alone"))
    assert same_bytes(tmp_path / "out", tmp_path / "alone")


def test_a_leaving_machine_s_units_are_converted_by_another(
    cluster: Any, keys: dict[str, Any], config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves while it converts units: every CPU of the cluster is in use, one of them its own."""
    for number in range(4, 10):
        write_parquet(tmp_path / "text" / f"{number}.parquet", sentences(6000, seed=number))
    leaving = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    address = {"address": cluster.address, "workers": 3}
    converted = threading.Event()

    def leave() -> None:
        # A worker that is still starting has no unit yet; all have one by the time that a third of the units is done.
        while not (len([*(tmp_path / "out").glob("train/*")]) >= 8 and ray.available_resources().get("CPU", 0) == 0):
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
