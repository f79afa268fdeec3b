"""A dataset of the hub, through the hub's own client, from a server that answers as the hub does."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.config.load import dump
from helpers import warm
from helpers.hub_server import Repository, serve_hub
from helpers.texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
NAME = "HuggingFaceFW/fineweb-edu"
COMMIT, NEWER = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9", "0" * 39 + "1"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def records(count: int, seed: int) -> list[dict[str, Any]]:
    """With FineWeb-Edu's columns."""
    return [
        {
            "text": record["text"],
            "id": f"<urn:uuid:{record['id']}>",
            "dump": "CC-MAIN-2013-20",
            "url": "http://example.org/",
            "file_path": "s3://commoncrawl/x.warc.gz",
            "language": "en",
            "language_score": 0.9,
            "token_count": 10,
            "score": 2.6 + number % 3,
            "int_score": 3 + number % 3,
        }
        for number, record in enumerate(sentences(count, seed=seed))
    ]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("hub")
    folders = {COMMIT: root / "pinned", NEWER: root / "newer"}
    for commit, folder in folders.items():
        for name in ("sample/10BT", "data/CC-MAIN-2013-20"):
            (folder / name).mkdir(parents=True)
        (folder / "README.md").write_text(CARD)
        for number in range(2):
            write_parquet(folder / "sample" / "10BT" / f"{number:03d}_00000.parquet", records(300, seed=number))
        write_parquet(folder / "data" / "CC-MAIN-2013-20" / "train-0.parquet", records(50, seed=len(commit)))
    write_parquet(root / "newer" / "sample" / "10BT" / "002_00000.parquet", records(300, seed=9))
    return Repository(folders, {"v1": COMMIT, "main": NEWER})


@dataclass
class Hub:
    """The hub's environment, and a process that has imported the hub's client with it."""

    environment: dict[str, str]
    server: warm.Server

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.server.start(list(arguments), 1, self.environment, module="biphasic").wait()


@pytest.fixture(scope="module")
def hub(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serve_hub({NAME: repository}, tmp_path_factory.mktemp("home")) as environment:
        modules = ("biphasic.conversion.plan", "biphasic.conversion.verify", "datasets.load", "huggingface_hub.hf_api")
        server = warm.Server({**environment, "OMP_NUM_THREADS": "1"}, *modules)
        yield Hub(environment, server)
        server.process.kill()


def run(hub: Hub, tmp_path: Path, config: ConvertConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config))
    return hub.run("convert", str(path), *arguments)


def test_a_pinned_dataset_of_the_hub(hub: Hub, config_for: Make, tmp_path: Path) -> None:
    source = {"kind": "hub", "path": NAME, "name": "sample-10BT", "revision": COMMIT}
    config = config_for([], source=source, cluster={"workers": 1}, filters=[{"column": "int_score", "min": 4}])
    planned = run(hub, tmp_path, config, "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "2 files, " in planned.stdout
    assert "600 documents" in planned.stdout
    command = run(hub, tmp_path, config)
    assert command.returncode == 0, command.stdout + command.stderr
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["source"]["commit"] == COMMIT
    prefix = f"hf://datasets/{NAME}@{COMMIT}/sample/10BT"
    assert [file["path"] for file in record["source"]["files"]] == [f"{prefix}/{at:03d}_00000.parquet" for at in range(2)]
    assert record["documents"] == {"read": 600, "filtered": 200, "skipped": {}}
    again = run(hub, tmp_path, config)
    assert "nothing to do" in again.stdout, again.stdout + again.stderr


def test_the_newest_commit_is_looked_up_and_recorded(
    hub: Hub, repository: Repository, config_for: Make, tmp_path: Path
) -> None:
    source = {"kind": "hub", "path": NAME, "name": "sample-10BT"}
    command = run(hub, tmp_path, config_for([], source=source, cluster={"workers": 1}))
    assert command.returncode == 0, command.stdout + command.stderr
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["source"]["commit"] == NEWER
    assert record["documents"]["read"] == 900
    assert f"source.revision: {NEWER}" in command.stdout
    # The dataset moves on: what was converted stays right.
    repository.revisions["main"] = COMMIT
    again = run(hub, tmp_path, config_for([], source=source, cluster={"workers": 1}))
    assert "nothing to do" in again.stdout, again.stdout + again.stderr
    verified = hub.run("verify", str(tmp_path / "out"))
    assert verified.returncode == 0 and "sources: 3 files, unchanged" in verified.stdout, verified.stdout
    repository.revisions["main"] = NEWER
    # Unfinished, and the dataset has moved on since: what was begun is not mixed with other text.
    (tmp_path / "out" / "conversion.json").unlink()
    started = {"config": record["config"], "tokenizer": record["tokenizer"], "commit": COMMIT, "units": {}}
    (tmp_path / "out" / "conversion.started").write_text(json.dumps(started))
    moved = run(hub, tmp_path, config_for([], source=source, cluster={"workers": 1}))
    assert moved.returncode == 2
    assert f"now it is {NEWER}: set source.revision: {COMMIT} to finish it" in moved.stderr
    finished = run(hub, tmp_path, config_for([], source={**source, "revision": COMMIT}, cluster={"workers": 1}))
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source"]["commit"] == COMMIT
    # The commit may be named, and another may not.
    again = run(hub, tmp_path, config_for([], source={**source, "revision": COMMIT}, cluster={"workers": 1}))
    assert "nothing to do" in again.stdout, again.stdout + again.stderr
    other = run(hub, tmp_path, config_for([], source={**source, "revision": NEWER}, cluster={"workers": 1}))
    assert other.returncode == 2 and f"holds a conversion of commit {COMMIT}, not of" in other.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": NAME, "name": "sample-7BT"}, f"source {NAME}, sample-7BT: can't be read from the hub ("),
        ({"path": NAME, "name": "sample-10BT", "split": "test"}, "has no split 'test' (it has: train)"),
        ({"path": NAME, "name": "sample-10BT", "revision": "v9"}, "can't be read from the hub ("),
        ({"path": "nobody/nothing"}, "source nobody/nothing: can't be read from the hub ("),
    ],
)
def test_missing_hub_datasets_are_named(
    hub: Hub, config_for: Make, tmp_path: Path, source: dict[str, str], message: str
) -> None:
    command = run(hub, tmp_path, config_for([], source={"kind": "hub", **source}))
    assert command.returncode == 2
    assert message in command.stderr
    assert len(command.stderr.strip().splitlines()) == 1, command.stderr
    assert not (tmp_path / "out").exists()
