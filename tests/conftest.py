"""Fixtures that several folders use."""

import gc
import ipaddress
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.s3_server import CREDENTIALS, serve_s3
from helpers.store_servers import SERVERS, STORES, Environment

# Also in the processes that tests start.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# `tiny` is imported where it is used: tests/gpu/test_attention.py runs without Composer and Streaming.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules with few tests first: their tests are the longest, and the workers then end at the same time."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: counts[item.path])


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def collections_are_short() -> Iterator[None]:
    """Leave what a module's tests imported out of the garbage collections of the modules that follow."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extension modules report objects that are left at the end


@pytest.fixture(autouse=True)
def no_other_host_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests use this machine only: a request that a library makes on its own would wait where there is no network."""
    resolve, hosts = socket.getaddrinfo, set[str]()

    def resolve_local(host: Any, *arguments: Any, **keywords: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not name or name in ("localhost", socket.gethostname()) or _is_address(name):
            return resolve(host, *arguments, **keywords)
        if not name.endswith(".invalid"):  # a name that never exists
            hosts.add(name)
        raise socket.gaierror(socket.EAI_NONAME, f"{name} is another host")

    monkeypatch.setattr(socket, "getaddrinfo", resolve_local)
    yield
    # Google's client asks for an account's regions in a thread.
    assert hosts <= {"iamcredentials.googleapis.com"}


@pytest.fixture
def hub_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose libraries or names ask the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.tiny import write_rows, write_tokenizer

    folder = tmp_path_factory.mktemp("dataset")
    write_rows(folder / "train", 700, seed=1)
    write_rows(folder / "validation", 60, seed=2)
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def files_are_given_back() -> Iterator[None]:
    yield
    if "helpers.tiny" in sys.modules:
        sys.modules["helpers.tiny"].release_streaming()


Write = Callable[..., Path]


@pytest.fixture
def write_yaml(dataset: Path, tmp_path: Path) -> Write:
    """Writes a tiny run's YAML, with changes by dotted key; the data is copied, since Streaming unpacks beside it."""

    from helpers.tiny import content_of

    def write(name: str = "run", **changes: Any) -> Path:
        local = tmp_path / "data"
        if not local.exists():
            shutil.copytree(dataset, local)
        content = content_of(name, tmp_path / "runs", local)
        for key, value in changes.items():
            at, parts = content, key.split("__")
            for part in parts[:-1]:
                at = at.setdefault(part, {})
            at[parts[-1]] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.texts import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config_for(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Any]:
    """Makes the configuration of a conversion of files or records into `tmp_path / "out"`; keywords replace its keys."""
    from biphasic.config.convert import ConvertConfig
    from helpers.texts import write_parquet

    def make(text: Any, **keys: Any) -> ConvertConfig:
        if isinstance(text, list):
            text = write_parquet(tmp_path / "text.parquet", text)
        defaults = {
            "job": "convert",
            "source": {"kind": "files", "paths": [str(text)]},
            "output": str(tmp_path / "out"),
            "tokenizer": str(tokenizer_folder),
            "sequence_length": 64,
            "shard_bytes": 8192,
        }
        return ConvertConfig.model_validate({**defaults, **keys})

    return make


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An S3 server over a folder, whose folders are its buckets; the environment points to it while it runs.

    It remembers which files are where, so put them there through it.
    """
    root = tmp_path_factory.mktemp("s3")
    server, port = serve_s3(root)
    environment = {**CREDENTIALS, "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_MAX_ATTEMPTS": "1"}
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    try:
        yield root
    finally:
        patch.undo()
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Environment]]:
    """Starts a server of `store_servers` once, and returns the environment that leads to it."""
    with ExitStack() as running:

        @cache
        def start(name: str) -> Environment:
            return running.enter_context(SERVERS[name](tmp_path_factory.mktemp(name)))

        yield start


MakeBucket = Callable[[str], str]


@pytest.fixture
def use_store(
    request: pytest.FixtureRequest, store_server: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], MakeBucket]:
    """Leads the environment to a store of a kind; returns what makes a bucket in it and returns the bucket's address."""
    from helpers.buckets import make_bucket

    def use(kind: str) -> MakeBucket:
        if kind == "rclone":
            request.getfixturevalue("s3")
            # It answers about one in 500 concurrent writes into new folders with a fault.
            monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
        else:
            for name, value in store_server(kind).items():
                monkeypatch.setenv(name, value)
        scheme = {"azurite": "az", "google": "gs"}.get(kind, "s3")
        return lambda name: make_bucket(f"{scheme}://{name}")

    return use


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, use_store: Callable[[str], MakeBucket]) -> MakeBucket:
    """Makes a bucket of a test's own in a store of each kind; returns its address."""
    return use_store(request.param)
