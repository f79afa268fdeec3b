"""A small tokenizer, and conversions of small texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.conversion import ConvertConfig
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
