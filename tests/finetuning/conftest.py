"""The toy sets, made once, and an untrained encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import write_tokenizer
from toy_sets import make_sets, write_encoder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tasks/` with a folder for each set, `start/` an untrained encoder, `tokenizer/`."""
    root = tmp_path_factory.mktemp("toy")
    write_tokenizer(root / "tokenizer")
    make_sets(root)
    write_encoder(root / "start", root / "tokenizer")
    return root
