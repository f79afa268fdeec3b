"""On a GPU: every attention backend and loss against the reference, a compiled run, and the microbatch that is found."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from biphasic.model import attention, kernels, losses
from biphasic.model.attention import BACKENDS, installed
from biphasic.model.fitting import largest, peak_bytes, room_bytes
from biphasic.model.segments import Segments
from conftest import Write
from tiny import config_of, train
from tiny import losses as losses_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda")
CUTS = [(300, 1, 83, 640), (512, 512), (1024,), (16,) * 64, (1023, 1)]


def attend(backend: str, lengths: tuple[int, ...], causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of grouped queries, 96 wide."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [torch.randn((1, heads, 1024, 96), generator=generator, device=DEVICE) for heads in (6, 2, 2)]
    leaves = [x.to(dtype).requires_grad_() for x in given]
    segments = Segments.of(lengths, DEVICE, longest=1024, attention=backend)
    attention.prepare(segments, object(), "cuda", dtype, causal)
    out, _ = attention.attention(torch.nn.Identity(), *leaves, segments=segments, is_causal=causal)
    (out.float() * torch.arange(out.numel(), device=DEVICE).reshape(out.shape).sin()).sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("lengths", CUTS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "mask"])
def test_backends_are_the_reference(backend: str, causal: bool, lengths: tuple[int, ...]) -> None:
    if not installed(backend):
        pytest.skip(f"{backend} isn't installed")
    expected = attend("mask", lengths, causal, torch.float32)
    for ours, theirs in zip(attend(backend, lengths, causal, torch.bfloat16), expected, strict=True):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.parametrize("kernel", losses.KERNELS)
def test_losses_are_those_with_full_logits(kernel: str) -> None:
    if kernel == "liger" and not kernels.liger_installed():
        pytest.skip("liger-kernel isn't installed")
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn((3000, 128), generator=generator, device=DEVICE, requires_grad=True)
    weight = (0.1 * torch.randn((5000, 128), generator=generator, device=DEVICE)).requires_grad_()
    targets = torch.randint(5000, (3000,), generator=generator, device=DEVICE)
    targets[::5] = losses.IGNORE
    found = []
    for ours in (True, False):
        if ours:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = losses.cross_entropy_sum(hidden, weight, targets, None, kernel)
        else:
            loss = losses.full_logits_cross_entropy_sum(hidden, weight, targets)
        loss.backward()
        found.append([loss.detach(), hidden.grad, weight.grad])
        hidden.grad = weight.grad = None
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("packing", ["varlen", "flex"])
def test_a_compiled_run_is_the_same_run(write_yaml: Write, packing: str) -> None:
    from torch._dynamo.utils import counters

    keys: dict[str, Any] = {"precision": "amp_bf16", "checkpoint__interval": "100ba"}
    plain = losses_of(train(config_of(write_yaml("plain", **keys, compute={"compile": False, "attention": "sdpa"}))))
    torch._dynamo.reset()
    counters.clear()
    compiled = losses_of(train(config_of(write_yaml("compiled", **keys, compute={"attention": packing}))))
    assert all(math.isclose(one, other, abs_tol=3e-2) for one, other in zip(plain, compiled, strict=True))
    # A layer in either phase, the last norm, the loss.
    assert counters["stats"]["unique_graphs"] == 4


def test_a_microbatch_is_found_remembered_and_fits(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"microbatch_size": "auto", "checkpoint__interval": "100ba", "compute": {"compile": False}}
    path = write_yaml("auto", **keys)
    folder = train(config_of(path))
    assert json.loads((folder / "microbatch.json").read_text())["rows"] == 8
    assert len(losses_of(folder)) == 12


def test_the_largest_that_fits() -> None:
    """A row is a gigabyte: one more than was found, or a few, would not fit."""

    def measure(rows: int) -> float | None:
        return peak_bytes(lambda: torch.empty(rows << 30, dtype=torch.uint8, device=DEVICE))

    room = room_bytes()
    found = largest(measure, 10_000, room)
    assert 0.9 * room <= found << 30 <= room


def test_batches_are_pinned(write_yaml: Write) -> None:
    from biphasic.data.streaming import loader

    config = config_of(write_yaml())
    spec = loader(config.data, config.data.streams, 4, seed=1, train=True)
    batch = next(iter(spec.dataloader))
    assert batch["tokens"].is_pinned() and batch["segment_ids"].is_pinned()


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
