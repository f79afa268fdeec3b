"""Stores: the same operations on a local folder and on a bucket, and atomic writes."""

import errno
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from biphasic.errors import UserError
from biphasic.storage import (
    UNFINISHED_PREFIX,
    LocalStore,
    Store,
    atomic_path,
    buckets,
    file_hash,
    is_folder,
    is_unreachable,
    open_store,
)
from biphasic.storage.buckets import S3Store
from biphasic.storage.promises import broken_promises
from conftest import MakeBucket
from helpers.ports import free_port
from helpers.s3_server import CREDENTIALS
from helpers.store_servers import STORES


@pytest.fixture(params=["folder", *STORES])
def place(request: pytest.FixtureRequest, tmp_path: Path, use_store: Callable[[str], MakeBucket]) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    return open_store(f"{use_store(request.param)('stores')}/{tmp_path.name}")


def test_files_are_written_listed_read_and_removed(place: Store, tmp_path: Path) -> None:
    assert place.list() == {} and place.stat("a/b.txt") is None
    place.write("a/b.txt", b"one")
    place.write("c.txt", b"three")
    assert {name: file.bytes for name, file in place.list().items()} == {"a/b.txt": 3, "c.txt": 5}
    assert list(place.list("a")) == ["a/b.txt"]
    before = place.stat("a/b.txt")
    place.write("a/b.txt", b"seven")
    assert place.read("a/b.txt") == b"seven" and place.stat("a/b.txt") != before
    file = tmp_path / "copy.txt"
    place.download("c.txt", file)
    assert file.read_bytes() == b"three"
    place.upload(file, "d/e.txt")
    assert file.exists() and place.read("d/e.txt") == b"three"
    temporary = place.scratch() / "moved.txt"
    temporary.write_bytes(b"moved")
    place.move(temporary, "f.txt")
    assert not temporary.exists() and place.read("f.txt") == b"moved"
    temporary.parent.rmdir()
    place.remove(["a/b.txt", "d/e.txt", "nothing.txt"])
    assert list(place.list()) == ["c.txt", "f.txt"]


def test_a_file_that_does_not_exist(place: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        place.read("nothing.txt")
    with pytest.raises(FileNotFoundError):
        place.download("nothing.txt", tmp_path / "file.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("old")
    digest = file_hash(file)

    def fail() -> None:
        with atomic_path(file) as partial:
            partial.write_text("half")
            assert list(LocalStore(str(tmp_path)).list()) == ["file.txt"]
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fail()
    assert file_hash(file) == digest and [path.name for path in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store, scandir = LocalStore(str(tmp_path)), os.scandir
    store.write("a/b/one", b"1")

    def fail(path: Any) -> Any:
        if Path(path).name == "b":
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match=rf"/a/b can't be listed \({re.escape(os.strerror(code))}"):
        store.list()
    assert store.list("nothing") == {}
    assert store.list("a/b/one") == {}


def test_two_machines_write_one_file_to_a_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.txt"
    with atomic_path(file) as first:
        first.write_text("first")
        monkeypatch.setattr(socket, "gethostname", lambda: "other")
        with atomic_path(file) as second:
            second.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_path(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / content).write_text(content)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == [content]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_next_write_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from biphasic.storage import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as partial: partial.write_text('half'); os.kill(os.getpid(), 9)"
    )
    file = tmp_path / "file.txt"
    subprocess.run([sys.executable, "-c", code, str(file)])
    [left] = tmp_path.iterdir()
    assert left.name.startswith(UNFINISHED_PREFIX)
    with atomic_path(file) as outer:
        outer.write_text("outer")
        assert list(tmp_path.iterdir()) == [outer]
    assert list(tmp_path.iterdir()) == [file]


def test_an_atomic_write_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first in a folder: what killed processes left there is known from then on."""
    listed, place = list[str](), LocalStore(str(tmp_path))
    left = tmp_path / f"{UNFINISHED_PREFIX}4194305-{socket.gethostname()}-late.txt"  # no process has this number
    left.write_text("half")
    for name in ("listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda folder, real=real: listed.append(str(folder)) or real(folder))
    for number in range(20):
        place.write(f"{number}.txt", b"content")
    assert listed == [str(tmp_path)] and left.exists()
    place.write("late.txt", b"content")
    assert listed == [str(tmp_path)] and not left.exists()


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    place = LocalStore(str(tmp_path))
    place.write("a/file.txt", b"1")
    (tmp_path / "a" / f"{UNFINISHED_PREFIX}x").write_text("half")
    assert list(place.list()) == ["a/file.txt"]
    place.remove_unfinished()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file.txt"]


def test_scratch_folders_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_store: Callable[[str], MakeBucket]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = open_store(f"{use_store('rclone')('scratch')}/x")
    if not (pid := os.fork()):
        (place.scratch() / "shard").write_text("half")
        os._exit(1)
    os.waitpid(pid, 0)
    [left] = tmp_path.iterdir()
    elsewhere = tmp_path / left.name.replace(socket.gethostname(), "another-host")
    elsewhere.mkdir()
    own = place.scratch()
    assert set(tmp_path.iterdir()) == {elsewhere, own}
    place.remove_unfinished()
    assert set(tmp_path.iterdir()) == {elsewhere, own}


def test_an_endpoint_without_a_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(UserError, match=r"^S3_ENDPOINT_URL: expected an address that begins with http:// or https://$"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("path", ["ftp://host/x", "dbfs://out/train", "file:///x"])
def test_an_unsupported_scheme_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="is not supported; expected a local path, s3://"):
        open_store(path)


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://bucket/x", "az://bucket/x"])
def test_a_store_that_does_not_answer_is_unreachable(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(buckets, "_GCS_RETRIES", timedelta(seconds=1))
    for name, value in {
        **CREDENTIALS,
        "AWS_MAX_ATTEMPTS": "1",
        "S3_ENDPOINT_URL": nowhere,
        "STORAGE_EMULATOR_HOST": nowhere,
        "AZURE_ACCOUNT_NAME": "account",
        "AZURE_ACCOUNT_ACCESS_KEY": "a2V5",
        "AZURE_STORAGE_SERVICE_ENDPOINT": f"{nowhere}/account",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError) as unreachable:
        open_store(address).list()
    assert is_unreachable(unreachable.value), repr(unreachable.value)


def test_errors_of_other_libraries_that_may_pass() -> None:
    """By their causes, which Azure's library keeps in an attribute, and by the status of a response."""

    class OfAzure(Exception):
        inner_exception = ConnectionResetError()

    class OfGoogle(Exception):
        def __init__(self, status: int):
            self.response = SimpleNamespace(status_code=status)

    assert all(map(is_unreachable, (OfAzure(), OfGoogle(503), OfGoogle(429), socket.gaierror())))
    assert not any(map(is_unreachable, (OfGoogle(404), OfGoogle(403), ValueError())))


def test_an_object_that_is_gone_may_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's S3 interface answers with an error, also to a request that is repeated."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    store, answers = open_store("s3://bucket/x"), {"Error": {"Code": "NoSuchKey"}}
    assert isinstance(store, S3Store)

    def delete(**_: str) -> None:
        raise ClientError(answers, "DeleteObject")  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(store, "_client", SimpleNamespace(delete_object=delete))
    store.remove(["gone"])
    answers["Error"]["Code"] = "AccessDenied"
    with pytest.raises(OSError, match="AccessDenied"):
        store.remove(["kept"])


def test_a_folder_that_may_not_be_entered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    assert not is_folder("/nowhere") and is_folder("/")
    monkeypatch.setattr("biphasic.storage.files.os.stat", refuse)
    with pytest.raises(UserError, match=r"^/home/colleague/tok: can't be read \(Permission denied\)$"):
        is_folder("/home/colleague/tok")


def write_in_place(store: LocalStore, name: str, content: bytes) -> None:
    with (Path(store.root) / name).open("wb", 0) as file:
        file.write(content[:500])
        time.sleep(0.05)
        file.write(content[500:])


def test_each_store_keeps_its_promises(place: Store, request: pytest.FixtureRequest) -> None:
    broken = broken_promises(place.root, "preflight")
    torn = "a reader sees a part of a file that is being written: it could take a held lock for damaged"
    if "s3rver" in request.node.name:  # not a store for runs, and preflight says so
        assert "listings that have a second page fail: folders of over 1,000 files can't be read" in broken
        assert torn in broken
    else:
        assert broken == [] or (broken == [torn] and "rclone" in request.node.name)  # seen there in 16 of 120 trials
    assert place.list() == {}


@pytest.mark.parametrize(
    ("method", "does", "expected"),
    [
        (
            "list",
            lambda store, below="": {},
            "a file isn't listed once it is written: two starts at once could both train",
        ),
        ("read", lambda store, name: b"old", "a file that was overwritten is read as it was: heartbeats of a lock"),
        ("upload", lambda store, file, name: store.write(name, bytes(9 << 20)), "a file of 9 MiB is read otherwise"),
        ("write", write_in_place, "a reader sees a part of a file that is being written"),
        ("remove", lambda store, names: None, "a file that was deleted is still there: locks"),
    ],
)
def test_a_broken_promise_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, does: Any, expected: str
) -> None:
    monkeypatch.setattr(LocalStore, method, does)
    assert any(line.startswith(expected) for line in broken_promises(str(tmp_path), "preflight"))
