"""What a GPU is, and the rates that it reaches in a large matrix product and a large copy."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from biphasic.model.attention import BACKEND_FUNCTIONS, backend_available


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def roofline(device: str, side: int = 8192, copied: int = 2 << 30) -> dict[str, float]:
    """FLOP/s of a large bf16 matrix product of random numbers, and bytes/s (read and written) of a large copy."""

    def median(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        durations = []
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            durations.append(time.perf_counter() - start)
        return statistics.median(durations)

    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    return {
        "matrix_product_flops_per_second": 2 * side**3 / median(lambda: a @ b),
        "copy_bytes_per_second": 2 * copied / median(lambda: target.copy_(source)),
    }


def describe_machine() -> dict[str, Any]:
    """Device and versions."""
    import transformers

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,  # pyright: ignore[reportAttributeAccessIssue]
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "attention_backends": [backend for backend in BACKEND_FUNCTIONS if backend_available(backend)],
        "date": datetime.now(UTC).date().isoformat(),
    }
