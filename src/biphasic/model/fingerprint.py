"""Compute fingerprints of models and files, which show whether they have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from biphasic.model.backbone import load_hf_config
from biphasic.storage import cached_file_hash

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "config.json", "*.distcp", ".metadata", "*.py")


def model_fingerprint(path: str, revision: str | None) -> str:
    """Return the hashes of a model's files; for a model on the hub, the commit.

    Raises:
        UserError: the model doesn't exist.
    """
    local = Path(path)
    if local.is_file():
        return cached_file_hash(local)
    if not local.is_dir():
        from huggingface_hub import hf_hub_download

        load_hf_config(path, revision)
        # The hub's cache stores a commit's files in a folder that is named after the commit.
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent.name
    files = sorted({file for pattern in _PATTERNS for file in local.glob(pattern) if file.is_file()})
    return "-".join(cached_file_hash(file) for file in files)


def file_stamps(path: str) -> tuple[Any, ...]:
    """Return name, size and modification time of a file or of a folder's entries, as a key for caches of their content."""
    local = Path(path)
    files = sorted(local.iterdir()) if local.is_dir() else [local] if local.is_file() else []
    return tuple((file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])
