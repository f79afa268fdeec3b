"""Format bytes and durations for display."""


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, e.g. `1.23 GB`."""
    units = ["B", "KB", "MB", "GB", "TB", "PB"]
    while abs(count) >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.1f} hours"
