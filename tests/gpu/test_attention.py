"""On a GPU, with PyTorch and transformers alone: every attention backend and the losses against the reference."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_on_cpu  # noqa: F401 - the reference
from biphasic.model import attention, kernels, losses
from biphasic.model.attention import installed
from biphasic.model.segments import Segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda")
CUTS = [(300, 1, 83, 640), (512, 512), (1024,), (16,) * 64, (1023, 1)]


def attend(
    backend: str, lengths: tuple[int, ...], causal: bool, dtype: torch.dtype, window: int = 0
) -> list[torch.Tensor]:
    """Output and gradients of grouped queries, 96 wide."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [torch.randn((1, heads, 1024, 96), generator=generator, device=DEVICE) for heads in (6, 2, 2)]
    leaves = [x.to(dtype).requires_grad_() for x in given]
    segments = Segments.of(lengths, DEVICE, longest=1024, attention=backend)
    config = type("Config", (), {"sliding_window": window})()
    attention.prepare(segments, config, "cuda", dtype, causal)
    out, _ = attention.attention(
        torch.nn.Identity(), *leaves, segments=segments, is_causal=causal, sliding_window=window
    )
    (out.float() * torch.arange(out.numel(), device=DEVICE).reshape(out.shape).sin()).sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


def close(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


# `varlen` with the kernels that it takes by itself (FlashAttention 4 or 3 if one is installed), and with each of PyTorch's.
WAYS = {
    "varlen": ("varlen", None),
    "varlen by cuDNN": ("varlen", SDPBackend.CUDNN_ATTENTION),
    "varlen by FlashAttention": ("varlen", SDPBackend.FLASH_ATTENTION),
    "flash2": ("flash2", None),
    "flex": ("flex", None),
    "sdpa": ("sdpa", None),
}


@pytest.mark.parametrize("lengths", CUTS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_backends_are_the_reference(way: str, causal: bool, lengths: tuple[int, ...]) -> None:
    backend, kernel = WAYS[way]
    if not installed(backend):
        pytest.skip(f"{backend} isn't installed")
    if kernel == SDPBackend.CUDNN_ATTENTION and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("PyTorch uses cuDNN for segments on Hopper and Blackwell data-center GPUs only")
    chosen: AbstractContextManager[object] = nullcontext() if kernel is None else sdpa_kernel(kernel)
    with chosen:
        ours = attend(backend, lengths, causal, torch.bfloat16)
    close(ours, attend("mask", lengths, causal, torch.float32))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["varlen", "flash2", "flex", "sdpa"])
def test_windows(backend: str, causal: bool) -> None:
    if not installed(backend):
        pytest.skip(f"{backend} isn't installed")
    ours = attend(backend, CUTS[0], causal, torch.bfloat16, window=100)
    close(ours, attend("mask", CUTS[0], causal, torch.float32, window=100))


@pytest.mark.parametrize("compiled", [True, False])
def test_losses_are_those_with_full_logits(compiled: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn((3000, 128), generator=generator, device=DEVICE, requires_grad=True)
    weight = (0.1 * torch.randn((5000, 128), generator=generator, device=DEVICE)).requires_grad_()
    targets = torch.randint(5000, (3000,), generator=generator, device=DEVICE)
    targets[::5] = losses.IGNORE
    found = []
    for ours in (True, False):
        if ours:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = losses.cross_entropy_sum(hidden, weight, targets, None, compiled)
        else:
            loss = losses.full_logits_cross_entropy_sum(hidden, weight, targets)
        loss.backward()
        found.append([loss.detach(), hidden.grad, weight.grad])
        hidden.grad = weight.grad = None
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


def test_a_step_does_not_wait_within_layers() -> None:
    """From the segments to the loss of a compiled layer, nothing asks the device for a number."""
    from backbones import backbone
    from biphasic.model.packed import encode

    model = backbone("llama").to(DEVICE)
    kernels.compile_layers(model)
    tokens = torch.arange(21, device=DEVICE)

    def forward() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            encode(model, tokens, Segments.of((5, 9, 1, 6), DEVICE, longest=21), causal=True).sum().backward()

    forward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
