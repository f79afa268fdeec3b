"""Look up the peak FLOP/s of GPUs, for computing model FLOPs utilization (MFU)."""

from __future__ import annotations

import torch

# TFLOP/s of dense (not sparse) matrix products with fp32 accumulation, in bf16 and in fp32 without tensor cores, which is
# PyTorch's default. Source: the vendors' data sheets. For AMD's MI250X it is half, because a device is one of its two dies.
_PEAKS = (
    ("H200", 989.4, 66.9),
    ("H100 PCIe", 756.0, 51.2),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.4, 66.9),
    ("GH200", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("RTX A6000", 154.8, 38.7),
    ("MI300X", 1307.4, 163.4),
    ("MI250X", 191.5, 47.9),
)


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU; None for an unknown one.

    Args:
        name: device name from `torch.cuda.get_device_name`.
        dtype: dtype of the operands.
    """
    for known, half, single in _PEAKS:
        if known.lower() in name.lower():
            return 1e12 * (single if dtype == torch.float32 else half)
    return None
