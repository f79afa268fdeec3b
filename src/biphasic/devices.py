"""Choose the device of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
