"""What a resumed run may not change: everything that decides the weights."""

from __future__ import annotations

from typing import Any

from biphasic.config.schema import PretrainConfig

_FREE = (
    "run_name",
    "output",
    "tokenizer",  # a path; its hash is compared with the data's
    "microbatch_size",
    "evaluation",
    "checkpoint",
    "parallelism",
    "compute",
    "logging",
    "optimizer.skip_nonfinite",
    "data.validation",
    "data.predownload",
    "data.cache_limit",
    "data.download_retry",
    "data.download_timeout",
    "data.num_workers",
    "data.check_hashes",
)
_PLACES = ("local", "remote")
"""Of data streams: paths; what lies there is compared by the hash of its index."""


def deciding(config: PretrainConfig) -> dict[str, Any]:
    """Every key that decides the weights, and its value; the number of ranks, paths and intervals don't."""
    found = _flat(config.model_dump(mode="json"), "")
    return {key: value for key, value in sorted(found.items()) if not _is_free(key)}


def differences(before: dict[str, Any], now: dict[str, Any], allowed: list[str]) -> list[str]:
    """What differs between two runs' deciding keys, a line each, less what is allowed to.

    Args:
        before: of the checkpoint.
        now: of the configuration.
        allowed: keys, or sections.
    """
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not any(_within(key, name) for name in allowed):
            lines.append(f"{key}: {_said(before, key)} until now, {_said(now, key)} here")
    return lines


def _said(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def _flat(value: Any, key: str) -> dict[str, Any]:
    """Values by their dotted keys; None says as much as a key that isn't there."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, child in items for k, v in _flat(child, f"{key}.{name}" if key else str(name)).items()}
    return {} if value is None else {key: value}


def _is_free(key: str) -> bool:
    if any(_within(key, free) for free in _FREE):
        return True
    return key.startswith(("data.train.", "data.mix.")) and key.rpartition(".")[2] in _PLACES


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
