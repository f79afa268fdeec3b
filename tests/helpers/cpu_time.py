"""How long commands run, by the CPU's clock: what they take does not depend on what runs beside them."""

import resource
import subprocess
from typing import Any


def run_measured(command: list[Any], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; returns what it printed, and the CPU seconds of it and its children."""
    before = _seconds()
    run = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return run, _seconds() - before


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
