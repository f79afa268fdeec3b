"""A small tokenizer, conversions of small texts, and a real S3 server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.conversion import ConvertConfig
from texts import Records, write_parquet, write_tokenizer

KEY, SECRET = "biphasic-test-key", "biphasic-test-secret"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config_for(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., ConvertConfig]:
    """A conversion of given files or records into `tmp_path / "out"`, with other keys as given."""

    def make(text: Path | str | Records, **keys: Any) -> ConvertConfig:
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rclone = Path(sys.executable).parent / "rclone"
    address = f"127.0.0.1:{port}"
    server = subprocess.Popen(
        [rclone, "serve", "s3", root, "--addr", address, "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    environment = {
        "S3_ENDPOINT_URL": f"http://{address}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        # rclone gives a part of a file the checksum of the whole, which pyarrow then finds wrong.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    try:
        _wait_for(port, server)
        yield root
    finally:
        patch.undo()
        server.terminate()
        server.wait(10)


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"rclone ended with status {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("rclone serve s3 does not answer")
