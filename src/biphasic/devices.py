"""Choose the device of this process, and check what it supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from biphasic.errors import UserError

if TYPE_CHECKING:
    from composer.devices import Device


def rank_device() -> Device:
    """Return this rank's GPU as a Composer device, or the CPU if there is no GPU.

    Matrix products of fp32 are computed in fp32. Composer's own default is TF32, which has 10 bits of mantissa, and each
    device that Composer creates by itself would set it again.
    """
    import torch
    from composer.devices import DeviceCPU, DeviceGPU

    return DeviceGPU(allow_tf32=False) if torch.cuda.is_available() else DeviceCPU()


def supports_bf16() -> bool:
    """Return whether this machine's GPU multiplies matrices in bf16: NVIDIA's since Ampere, and AMD's.

    On older ones, and on CPUs, PyTorch emulates bf16, and Triton doesn't compile for it.
    """
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def require_precision(precision: str) -> None:
    """Check that this machine supports a precision.

    Raises:
        UserError: `amp_bf16` is requested and this machine has no GPU that computes in bf16.
    """
    import torch

    if precision == "amp_bf16" and not supports_bf16():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "there is none here"
        raise UserError(
            f"precision: amp_bf16 needs a GPU of compute capability 8.0 (Ampere) or later ({name}): precision=fp32 runs "
            "everywhere"
        )
