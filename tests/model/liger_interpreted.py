"""Helper of test_kernels.py: liger-kernel's kernels, run by Triton's interpreter, against plain PyTorch.

TRITON_INTERPRET=1 python liger_interpreted.py FAMILY ...
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime.driver import driver

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@triton.jit
def rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x):
    return 1 - 2 / (1 + tl.exp(2 * x))


def interpret() -> None:
    """The interpreter needs no GPU, but asks for its driver, and lacks the functions of CUDA's library."""
    target = types.SimpleNamespace(backend="cuda", arch=90)
    driver.set_active(
        types.SimpleNamespace(
            get_benchmarker=lambda: None,
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cpu,
        )
    )
    libdevice.rsqrt, libdevice.tanh = rsqrt, tanh


def check_loss() -> None:
    from biphasic.model import losses

    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(50, (12,))
    targets[::3] = losses.IGNORE
    found = []
    for kernel in ("liger", "chunked"):
        loss = losses.cross_entropy_sum(hidden, weight, targets, None, kernel)
        (0.37 * loss).backward()
        found.append([loss.detach(), hidden.grad, weight.grad])
        hidden.grad = weight.grad = None
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def check_layers(families: list[str]) -> None:
    from backbones import backbone, gradients
    from biphasic.model import kernels

    # All of them before the first is changed: what is built later in this process has liger-kernel's parts.
    models = {family: backbone(family) for family in families}
    expected = {family: gradients(model, "sdpa", batches=[1, 5]) for family, model in models.items()}
    for family, model in models.items():
        kernels.use_liger(model)
        found = gradients(model, "sdpa", batches=[1, 5])
        for ours, theirs in zip(found, expected[family], strict=True):
            error = float((ours - theirs).norm() / theirs.norm())
            assert 0 < error < 1e-4, (family, error)
        print(family, flush=True)


if __name__ == "__main__":
    interpret()
    check_loss()
    check_layers(sys.argv[1:])
