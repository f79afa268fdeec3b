"""A small tokenizer, conversions of small texts, and a real S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.conversion import ConvertConfig
from s3_server import KEY, SECRET, free_port, serve_s3
from texts import Records, write_parquet, write_tokenizer


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
    port = free_port()
    server = serve_s3(root, port)
    environment = {
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
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
        yield root
    finally:
        patch.undo()
        server.terminate()
        server.wait(10)
