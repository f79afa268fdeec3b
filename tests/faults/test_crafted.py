"""Checkpoints, datasets and models from elsewhere, made to write outside their folder or to run code."""

import json
import logging
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.checkpointing.manifest import Manifest, newest_complete, read_manifest
from biphasic.checkpointing.run_lock import RunLock, process_id
from biphasic.checkpointing.upload import write_missing_manifests
from biphasic.commands import main
from biphasic.config.pretrain import PretrainConfig
from biphasic.conversion.verify import verify
from biphasic.data.mds_reader import read_rows
from biphasic.data.streaming import build_loader
from biphasic.errors import UserError
from biphasic.model.checkpoint import require_safe_checkpoint
from biphasic.model.hf_config import load_hf_config
from biphasic.ranks import run_rank
from biphasic.storage import atomic_path, file_hash, open_store
from biphasic.workers.local import LocalWorkers
from conftest import Write
from helpers.buckets import bucket_for
from helpers.stored_checkpoints import checkpoint_of, network
from helpers.tiny import config_of
from helpers.worker_objects import Total, result

OUTSIDE = ["../escaped", "/tmp/escaped", "ep0-ba9/../../escaped", "lock.json", "ba8-rank0.pt", "ep0-ba8/__0_0.distcp"]


def write_crafted(folder: Path, batch: int, *names: str, path: str | None = None) -> Manifest:
    """A checkpoint whose manifest names other files, too."""
    own = f"ba{batch}-rank0.pt"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / own).write_text("weights")
    entry = ((folder / own).stat().st_size, file_hash(folder / own))
    manifest = Manifest(batch, path or own, dict.fromkeys((own, *names), entry), {"name": "run", "writers": 1})
    (folder / f"ba{batch}.json").write_bytes(manifest.to_bytes())
    return manifest


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_other_files_is_refused(
    s3: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, message = tmp_path / "run", f"ba9.json names {name!r}, which is not a file of its checkpoint"
    write_crafted(folder, 7)
    write_crafted(folder, 9, name)
    found = newest_complete(open_store(str(folder)), folder)
    assert found is not None and found.batch == 7 and message in caplog.text
    # One checkpoint of a bucket is downloaded without a look at its other files.
    place = f"s3://{bucket_for(s3, 'crafted')}/{OUTSIDE.index(name)}"
    open_store(place).upload(folder / "ba9.json", "ba9.json")
    with pytest.raises(UserError, match=r"names .*, which is not a file of its checkpoint"):
        local_checkpoint(f"{place}/ba9-rank0.pt", tmp_path / "a" / "downloads")
    # A rank's part.
    open_store(place).remove(["ba9.json"])
    open_store(place).upload(folder / "ba9.json", "ba9.rank0.json")
    assert write_missing_manifests(open_store(place), open_store(place).list()) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"] and not Path("/tmp/escaped").exists()


@pytest.mark.parametrize("path", ["../run", "/etc", "ep0-ba9/../.."])
def test_a_manifest_whose_checkpoint_is_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    write_crafted(tmp_path, 9, path=path)
    with pytest.raises(ValueError, match="which is not a file of its checkpoint"):
        read_manifest(open_store(str(tmp_path)), "ba9.json")


def test_a_checkpoint_isn_t_downloaded_through_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, local, elsewhere = tmp_path / "source", tmp_path / "local", tmp_path / "elsewhere"
    (source / "ep0-ba9").mkdir(parents=True)
    file = source / "ep0-ba9" / ".metadata"
    file.write_text("weights")
    manifest = Manifest(9, "ep0-ba9", {"ep0-ba9/.metadata": (7, file_hash(file))}, {"name": "run"})
    (source / "ba9.json").write_bytes(manifest.to_bytes())
    local.mkdir()
    elsewhere.mkdir()
    (local / "ep0-ba9").symlink_to(elsewhere)
    assert newest_complete(open_store(str(source)), local) is None
    assert "is a link" in caplog.text and not list(elsewhere.iterdir())
    (local / "ep0-ba9").unlink()
    assert newest_complete(open_store(str(source)), local) == manifest


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"s3://{bucket_for(s3, 'crafted-names')}/prefix"


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", ".."])
def test_no_store_leaves_its_folder(place: str, name: str, tmp_path: Path) -> None:
    store, file = open_store(place), tmp_path / "file"
    file.write_text("content")
    for action in (
        lambda: store.write(name, b"content"),
        lambda: store.upload(file, name),
        lambda: store.move(file, name),
        lambda: store.remove([name]),
        lambda: store.read(name),
        lambda: store.download(name, tmp_path / "copy"),
    ):
        with pytest.raises(OSError, match="leads out of the folder"):
            action()
    assert file.exists() and not (tmp_path / "escaped").exists() and not Path("/tmp/escaped").exists()


def test_a_folder_is_not_left_through_a_link(tmp_path: Path) -> None:
    elsewhere, store = tmp_path / "elsewhere", tmp_path / "store"
    elsewhere.mkdir()
    store.mkdir()
    (elsewhere / "file").write_text("theirs")
    (store / "attempts").symlink_to(elsewhere)
    for action in (
        lambda: open_store(str(store)).write("attempts/file", b"mine"),
        lambda: open_store(str(store)).remove(["attempts/file"]),
    ):
        with pytest.raises(OSError, match="is a link"):
            action()
    # A link in place of the file that a write begins with.
    (store / f".unfinished-{os.getpid()}-{socket.gethostname()}-ba1-rank0.pt").symlink_to(elsewhere / "file")
    with atomic_path(store / "ba1-rank0.pt") as partial:
        partial.write_text("mine")
    assert (elsewhere / "file").read_text() == "theirs" and (store / "ba1-rank0.pt").read_text() == "mine"
    # The folder itself may be a link, for example to a larger disk.
    (tmp_path / "link").symlink_to(store)
    open_store(str(tmp_path / "link")).write("a/file", b"mine")
    assert (store / "a" / "file").read_bytes() == b"mine"


def test_a_lock_with_another_path_as_its_attempt(tmp_path: Path) -> None:
    dead = [*process_id(os.getpid())[:2], "999999999", "1"]
    lock = {"attempt": "../../escaped", "host": "h", "pid": 1, "process": dead, "since": "", "beat": 0}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock.json").write_text(json.dumps(lock))
    with pytest.raises(UserError, match=r"'attempts/\.\./\.\./escaped\.json' leads out of the folder"):
        RunLock(str(tmp_path / "run")).acquire(1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def crafted_index(folder: Path, kind: str, name: str) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0][kind]["basename"] = name
    (folder / "index.json").write_text(json.dumps(index))


def open_data(config: PretrainConfig) -> Any:
    return build_loader(config.data.reading, config.data.streams, 8, seed=3, train=True)


@pytest.mark.parametrize("kind", ["raw_data", "zip_data"])
@pytest.mark.parametrize("name", ["../escaped.mds", "/tmp/escaped.mds"])
def test_a_shard_outside_the_dataset_is_refused(write_yaml: Write, tmp_path: Path, kind: str, name: str) -> None:
    path = write_yaml("crafted")
    crafted_index(tmp_path / "data" / "train", kind, name)
    with pytest.raises(UserError, match=rf"train/index.json: names the shard '{name}', which leads out of its folder"):
        open_data(config_of(path))
    if kind == "zip_data":
        with pytest.raises(UserError, match="leads out of the folder"):
            list(read_rows(str(tmp_path / "data" / "train"), [0]))


def test_a_shard_behind_a_link_is_refused(write_yaml: Write, tmp_path: Path) -> None:
    """Streaming would unpack it beside the compressed one."""
    path = write_yaml("linked")
    train, elsewhere = tmp_path / "data" / "train", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (train / "unit").symlink_to(elsewhere)
    crafted_index(train, "raw_data", "unit/authorized_keys")
    with pytest.raises(UserError, match=r"train/index.json: names shards in .*train/unit, which is a link"):
        open_data(config_of(path))
    assert not list(elsewhere.iterdir())


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_column_of_pickles_is_refused(tmp_path: Path) -> None:
    from streaming import MDSWriter

    folder = tmp_path / "data"
    with MDSWriter(out=str(folder), columns={"tokens": "bytes", "lengths": "bytes"}) as out:
        out.write({"tokens": pickle.dumps(Canary(tmp_path / "escaped")), "lengths": b""})
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["column_encodings"] = ["pkl", "bytes"]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="unsafe type: pkl"):
        list(read_rows(str(folder), [0]))
    assert not (tmp_path / "escaped").exists()


def test_a_sharded_checkpoint_that_names_other_files_is_refused(tmp_path: Path, dataset: Path) -> None:
    path = checkpoint_of(network(), tmp_path / "run", dataset / "tokenizer", sharded=True)
    require_safe_checkpoint(str(path))
    index = pickle.loads((path / ".metadata").read_bytes())
    key = next(iter(index.storage_data))
    index.storage_data[key] = replace(index.storage_data[key], relative_path="../../escaped")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"\.metadata names '\.\./\.\./escaped', which leads out of the checkpoint"):
        require_safe_checkpoint(str(path))


def test_a_conversion_s_record_with_other_paths_is_refused(tmp_path: Path) -> None:
    record = {"units": ["../../escaped"], "splits": {}}
    (tmp_path / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"conversion.json: names '\.\./\.\./escaped', which leads out of its folder"):
        verify(str(tmp_path))


def test_a_model_s_own_code_runs_only_with_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, canary = tmp_path / "model", tmp_path / "escaped"
    folder.mkdir()
    code = f"import os\nos.mkdir({str(canary)!r})\nfrom transformers import PretrainedConfig\n"
    (folder / "own.py").write_text(f"{code}class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    (folder / "model.safetensors").touch()
    with pytest.raises(UserError, match="can't be loaded"):
        load_hf_config(str(folder))
    assert not canary.exists()
    with caplog.at_level(logging.WARNING):
        load_hf_config(str(folder), trust_remote_code=True)
    assert canary.exists()
    assert f"model {folder}: runs its own Python code (own.OwnConfig), since trust_remote_code is true" in caplog.text


PASSWORD = "s3://key:canary@bucket/x"


@pytest.mark.parametrize(
    "arguments",
    [["runs", PASSWORD], ["export", PASSWORD, "out"], ["verify", PASSWORD], ["export", "here", "out", "--unknown", PASSWORD],
     ["preflight", "file.yaml", f"checkpoint.folder={PASSWORD}"]],
)  # fmt: skip
def test_a_password_on_the_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = "".join(capsys.readouterr())
    assert "s3://…: expected an address without user and password" in output and "canary" not in output


def test_a_password_in_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^s3://…: expected an address without user and password"):
        open_store(PASSWORD)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://key:canary@localhost:1")
    with pytest.raises(UserError, match=r"^S3_ENDPOINT_URL: expected an address without user and password") as raised:
        open_store("s3://bucket/x")
    assert "canary" not in str(raised.value)


@pytest.fixture
def no_umask() -> Iterator[None]:
    mask = os.umask(0)
    yield
    os.umask(mask)


def test_files_are_not_writable_by_everyone(no_umask: None, tmp_path: Path) -> None:
    def job() -> int:
        open_store(str(tmp_path)).write("a/record.json", b"{}")
        with atomic_path(tmp_path / "a" / "state.pt") as partial:
            partial.write_bytes(b"state")
        return 0

    assert run_rank(job) == 0
    for path in (tmp_path / "a", *(tmp_path / "a").iterdir()):
        assert not path.stat().st_mode & stat.S_IWOTH, path


def listening(process: int) -> list[str]:
    """The addresses on which a process accepts TCP connections."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    tables = [Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_workers_on_one_machine_listen_nowhere() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert listening(os.getpid())
    with closing(LocalWorkers({})) as group:
        group.open(1, "", Total, 0)
        about = result(group, "about")
        assert about["parent"] != os.getpid()
        assert listening(about["process"]) == listening(about["parent"]) == []
