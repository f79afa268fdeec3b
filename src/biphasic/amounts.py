"""Amounts as people read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def in_bytes(count: float) -> str:
    """Bytes in the largest unit of which there is at least one: `1.23 GB`, decimal as disks are sold."""
    units = ["B", "KB", "MB", "GB", "TB", "PB"]
    while abs(count) >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def in_time(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.1f} hours"


def bytes_of(text: str) -> int:
    """Read `200gb`: a number and kb, mb, gb or tb, decimal.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?)\s*([kmgt]?b?)\s*", text.lower())
    if match is None or (unit := match[2] if match[2] != "b" else "") not in _UNITS:
        raise ValueError(f"expected a size such as 200gb; got {text!r}")
    return int(float(match[1].replace("_", "")) * _UNITS[unit])
