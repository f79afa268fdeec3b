"""The cores and GPUs of this machine."""

from __future__ import annotations

import os
import subprocess


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_memory() -> list[int]:
    """Return the memory of each of this machine's GPUs in bytes, without initializing CUDA."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        sizes = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        return [int(line) * 2**20 for line in sizes.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def smallest_gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None if it is unknown or there is no GPU."""
    return min(gpu_memory(), default=None)


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them."""
    numbers = [str(number) for number in range(len(gpu_memory()))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not numbers:
        return numbers
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores what follows the first name that is not a device.
    end = next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]
