"""A mirror of the hub's data sets, and an encoder to score."""

from pathlib import Path

import pytest

from helpers.mteb_mirror import PROMPTS, write_mirror, write_model


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "encoder", PROMPTS)
