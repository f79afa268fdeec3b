"""Choose this process's device and memory allocator settings, and state which precisions and FLOP/s a device has."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from biphasic.errors import UserError
from biphasic.processes import available_cores

if TYPE_CHECKING:
    from composer.devices import Device


_FULL_GPU = re.compile(
    r"(CUDA|HIP) error: out of memory|Triton Error \[(CUDA|HIP)\]: out of memory|(CUBLAS|HIPBLAS|CUDNN)_STATUS_ALLOC_FAILED|"
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)


def describe_machine_once() -> None:
    """Let Composer describe the machine once in this process, with the processor's name from the kernel.

    By itself it starts a Python for the name (1 s), and looks through its own installed files for each checkpoint (50 ms).
    """
    from composer.utils import collect_env

    if hasattr(collect_env.get_composer_commit_hash, "cache_info"):
        return
    collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
    if name := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
        collect_env.get_cpu_model = lambda: name[1]


def rank_device() -> Device:
    """Return this rank's GPU as a Composer device, or the CPU if there is no GPU.

    Pass it wherever Composer takes a device. Devices that Composer creates by itself turn on TF32, which rounds fp32
    matrix products to 10 bits of mantissa. On the CPU, the ranks of a machine share the cores that its container may
    use, unless OMP_NUM_THREADS is set: PyTorch takes all cores of the machine for each.
    """
    from composer.devices import DeviceCPU, DeviceGPU

    if torch.cuda.is_available():
        return DeviceGPU(allow_tf32=False)
    if "OMP_NUM_THREADS" not in os.environ:
        share = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(min(max(share, 1), torch.get_num_threads()))
    return DeviceCPU()


def supports_bf16() -> bool:
    """Return whether this machine's GPU multiplies matrices in bf16, not only emulated: NVIDIA's since Ampere, and AMD's."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def require_precision(precision: str) -> None:
    """Raise a UserError if the precision is `amp_bf16` and no GPU here computes in bf16, or if GPUs here can't be used."""
    require_usable_gpus()
    if precision == "amp_bf16" and not supports_bf16():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine has no GPU"
        raise UserError(
            f"precision: amp_bf16 needs a GPU of compute capability 8.0 (Ampere) or later ({name}): precision=fp32 runs "
            "everywhere"
        )


def require_usable_gpus() -> None:
    """Raise a UserError if this machine has GPUs that PyTorch can't use."""
    if not torch.cuda.is_available() and (count := torch.cuda.device_count()):
        toolkit = torch.version.cuda or torch.version.hip  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            f"this machine has GPUs ({count}), but PyTorch can't use them: usually the driver is older than CUDA {toolkit} "
            "needs. Update it, install PyTorch for an older CUDA (docs/versions.md), or set CUDA_VISIBLE_DEVICES= (CPUs)"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that of a full GPU, not of full host memory, which the pinning thread reports alike."""
    text = str(error)
    by_library = _FULL_GPU.search(text) is not None and "pin memory thread" not in text
    return isinstance(error, torch.OutOfMemoryError) or by_library


def require_compiler() -> None:
    """Raise a UserError if Triton can't build its launcher, which needs a C compiler and Python's header files."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's, as Triton does
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    elsewhere = os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH")
    if not (header.is_file() or elsewhere) or not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError(
            f"compute.compile: needs a C compiler (gcc or clang) and {header}: install them (Debian and Ubuntu: apt install "
            "gcc python3-dev), or set compute.compile=false"
        )


def use_all_gpus(arguments: list[str]) -> None:
    """Restart a single process with one process per GPU if there are several; `arguments` are Composer's launcher's."""
    count = torch.cuda.device_count()
    if "WORLD_SIZE" not in os.environ and count > 1:
        command = [sys.executable, "-m", "composer.cli", "-n", str(count), *arguments]
        sys.stdout.flush()
        os.execv(command[0], command)


# TFLOP/s of dense (not sparse) matrix products with fp32 accumulation, in bf16, and in fp32 without tensor cores
# (PyTorch's default). The first pattern that a device's name contains is used, so longer names come first.
#
# Sources: the vendors' data sheets, which state bf16 with sparsity for GPUs since Ampere: twice these numbers. Of the HGX
# B200, HGX B300, GB200 NVL72 and GB300 NVL72 a GPU's share. RTX PRO 6000: 4 times its fp32 rate, where GeForce cards of the
# same generation have 2 times. RTX 6000 Ada: a quarter of its fp8 rate with sparsity. MI250X: half, as a device is one die.
_PEAKS = {
    "H200 NVL|H100 NVL": (835.5, 60.0),
    "H100 PCIe|H800 PCIe": (756.0, 51.2),
    "GH200|H200|H100|H800": (989.4, 66.9),
    "GB300": (2500.0, 80.0),
    "B300": (2250.0, 75.0),
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "A100|A800": (312.0, 19.5),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX PRO 6000 Blackwell Server": (480.0, 120.0),
    "RTX PRO 6000 Blackwell Max-Q": (440.0, 110.0),
    "RTX PRO 6000 Blackwell": (503.8, 126.0),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "RTX A6000": (154.8, 38.7),
    "MI300X": (1307.4, 163.4),
    "MI250X": (191.5, 47.9),
}


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak FLOP/s for operands of a dtype, by `torch.cuda.get_device_name`.

    None if it is unknown, as for a MIG device, a part of a GPU, and for laptops' cards, named like desktops' cards.
    """
    for pattern, (half, single) in _PEAKS.items():
        if re.search(rf"\b({pattern})\b(?!.*(\bMIG\b|Laptop))", name, re.IGNORECASE):
            return 1e12 * (single if dtype == torch.float32 else half)
    return None
