"""The resume guard: finds changes of keys that a resumed run may not change because they affect the weights."""

from __future__ import annotations

from typing import Any

from biphasic.config.pretrain import PretrainConfig

_CHANGEABLE = (
    "run_name",
    "output",
    "tokenizer",  # a path; the tokenizer's hash is compared with the data's
    "microbatch_size",
    "evaluation",
    "checkpoint",
    "parallelism",
    "compute",
    "logging",
    "optimizer.max_skipped_batches",
    "data.folder",
    "data.cache",
    "data.validation",
    "data.predownload",
    "data.cache_limit",
    "data.download_retry",
    "data.download_timeout",
    "data.num_workers",
    "data.check_hashes",
)
_STREAM_PATHS = ("local", "remote")
"""Keys of a training stream that may change, because its data is compared by the hash of its index."""


def guarded_keys(config: PretrainConfig) -> dict[str, Any]:
    """Return the keys that affect the weights, with their values. Paths, intervals and the number of ranks do not."""
    values = _flatten(config.model_dump(mode="json"), "")
    return {key: value for key, value in sorted(values.items()) if not _is_changeable(key)}


def changed_keys(before: dict[str, Any], now: dict[str, Any], overrides: list[str]) -> list[str]:
    """Return a line for each guarded key that differs.

    Args:
        before: guarded keys and values from the checkpoint.
        now: guarded keys and values from the configuration.
        overrides: keys or sections that may differ (`checkpoint.resume_overrides`).
    """
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not any(_is_within(key, name) for name in overrides):
            old, new = (repr(values[key]) if key in values else "nothing" for values in (before, now))
            lines.append(f"{key}: {old} until now, {new} here")
    return lines


def _flatten(value: Any, key: str) -> dict[str, Any]:
    """Return values by dotted key. Keys with the value None are left out."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        children = (_flatten(child, f"{key}.{name}" if key else str(name)) for name, child in items)
        return {name: leaf for child in children for name, leaf in child.items()}
    return {} if value is None else {key: value}


def _is_changeable(key: str) -> bool:
    if any(_is_within(key, name) for name in _CHANGEABLE):
        return True
    return key.startswith(("data.train.", "data.mix.")) and key.rpartition(".")[2] in _STREAM_PATHS


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
