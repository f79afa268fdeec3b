"""The toy sets and an untrained encoder, written once."""

from pathlib import Path

import pytest

from helpers.tiny import write_tokenizer
from helpers.toy_sets import make_sets, write_encoder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `tasks/` (a folder for each set), `start/` (an untrained encoder) and `tokenizer/`."""
    root = tmp_path_factory.mktemp("toy")
    write_tokenizer(root / "tokenizer")
    make_sets(root)
    write_encoder(root / "start", root / "tokenizer")
    return root
