"""Which model it is: by the content of its files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from biphasic.model.encoder import hf_config
from biphasic.storage import hash_of

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "config.json", "*.distcp", ".metadata", "*.py")


def model_mark(path: str, revision: str | None) -> str:
    """A hash of a model's files, or the hub's commit.

    Raises:
        UserError: it isn't there.
    """
    place = Path(path)
    if place.is_file():
        return _hash(path, stamp(path))
    if not place.is_dir():
        from huggingface_hub import hf_hub_download

        hf_config(path, revision)
        # The hub's cache keeps a commit's files in a folder of its name.
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent.name
    files = sorted({file for pattern in _WEIGHTS for file in place.glob(pattern) if file.is_file()})
    return "-".join(_hash(str(file), stamp(str(file))) for file in files)


def stamp(path: str) -> tuple[Any, ...]:
    """What changes when a file, or one of a folder's, does."""
    place = Path(path)
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    return tuple((file.name, about.st_size, about.st_mtime_ns) for file in files for about in [file.stat()])


@functools.cache
def _hash(path: str, stamp: Any) -> str:
    """Remembered while the file stays as it is: a sweep asks thousands of times."""
    return hash_of(Path(path))
