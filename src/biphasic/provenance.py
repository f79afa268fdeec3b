"""What a record says about the process that made it: source commit, host, hardware and versions."""

import functools
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_PACKAGES = ("biphasic", "mosaicml", "mosaicml-streaming", "torch", "transformers", "tokenizers")


@functools.cache
def provenance() -> dict[str, Any]:
    """Return `commit` (`+changes` if tracked files differ), `host`, `hardware` and `versions` of this process."""
    import torch

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    versions = {name: _version(name) for name in _PACKAGES}
    return {"commit": _commit(), "host": socket.gethostname(), "hardware": hardware, "versions": versions}


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _commit() -> str | None:
    """Return the commit of the sources, or BIPHASIC_COMMIT, which an image may be built with."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--match=", "--dirty=+changes"]
    with suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=60).strip()
    return os.environ.get("BIPHASIC_COMMIT") or None


def _cpu_name() -> str:
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1]
    return f"CPU ({platform.machine()})"
