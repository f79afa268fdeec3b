"""Amounts as people read them."""

from __future__ import annotations


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
