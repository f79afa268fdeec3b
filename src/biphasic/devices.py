"""Choose this process's device and memory allocator settings, and check which precisions the device supports."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from biphasic.errors import UserError

if TYPE_CHECKING:
    from composer.devices import Device


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocators() -> None:
    """Configure PyTorch's memory allocators, unless the environment has `PYTORCH_ALLOC_CONF` or one of its older names.

    PyTorch reads the variable when it is imported. Expandable segments of GPU memory cause less fragmentation, but
    WSL's driver fails on them. Pinned host memory is not rounded up to a power of two: saving a checkpoint of `1b`
    takes 17 GB instead of 27. torch 2.11 refuses that setting as unknown, and 2.15 has it.
    """
    if any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return
    from importlib.metadata import version

    settings = [] if "microsoft" in platform.release().lower() else ["expandable_segments:True"]
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
        settings.append("pinned_max_round_threshold_mb:1")
    os.environ[_ALLOCATOR_VARIABLES[0]] = ",".join(settings)


def rank_device() -> Device:
    """Return this rank's GPU as a Composer device, or the CPU if there is no GPU.

    Pass it wherever Composer takes a device. Devices that Composer creates by itself turn on TF32, which rounds fp32
    matrix products to 10 bits of mantissa.
    """
    import torch
    from composer.devices import DeviceCPU, DeviceGPU

    return DeviceGPU(allow_tf32=False) if torch.cuda.is_available() else DeviceCPU()


def supports_bf16() -> bool:
    """Return whether this machine's GPU multiplies matrices in bf16: NVIDIA's since Ampere, and AMD's.

    On older GPUs and on CPUs, PyTorch emulates bf16, and Triton can't compile for it.
    """
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def require_precision(precision: str) -> None:
    """Raise a UserError if the precision is `amp_bf16` and this machine has no GPU that computes in bf16."""
    import torch

    if precision == "amp_bf16" and not supports_bf16():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine has no GPU"
        raise UserError(
            f"precision: amp_bf16 needs a GPU of compute capability 8.0 (Ampere) or later ({name}): precision=fp32 runs "
            "everywhere"
        )
