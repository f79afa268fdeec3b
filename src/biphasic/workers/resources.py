"""The GPUs of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""The device files of NVIDIA's and AMD's drivers, and of WSL's."""
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TORCH = """import torch
for number in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(number).total_memory >> 20)"""


def gpu_memory() -> list[int | None]:
    """Return the memory of each of this machine's GPUs in bytes, None if it is unknown, without initializing CUDA.

    Asks PyTorch in another process if there is a driver but no nvidia-smi, as for AMD's GPUs and in some containers.
    """
    torch = [(sys.executable, "-c", _TORCH)] if any(map(os.path.exists, _DRIVERS)) else []
    # nvidia-smi would name the memory of the whole GPU that a MIG device is a part of.
    smi = [] if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") else [_NVIDIA_SMI]
    for query in (*smi, *torch):
        with suppress(OSError, subprocess.SubprocessError):
            sizes = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")
            # Of a GPU that shares the machine's memory, nvidia-smi prints [N/A]; without GPUs, a sentence.
            return [int(size) << 20 if size.isdecimal() else None for size in sizes if re.match(r"[\[\d]", size)]
    return []


def smallest_gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None if it is unknown or there is no GPU."""
    sizes = gpu_memory()
    known = [size for size in sizes if size is not None]
    return min(known, default=None) if len(known) == len(sizes) else None


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
