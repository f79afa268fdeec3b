"""On a GPU, with PyTorch and transformers alone: every attention backend and the losses against the reference."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from biphasic.model import attention, kernels, layers, losses
from biphasic.model.attention import backend_available
from biphasic.model.segments import Segments, rounded_count
from helpers import attention_on_cpu  # noqa: F401 - the reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda")
CUTS = [(300, 1, 83, 640), (512, 512), (1024,), (16,) * 64, (1023, 1)]


class Config:
    """The values of a backbone's configuration that are read."""

    num_attention_heads, num_key_value_heads, head_dim = 6, 2, 96

    def __init__(self, window: int = 0):
        self.sliding_window = window


def attend(backend: str, lengths: tuple[int, ...], causal: bool, dtype: torch.dtype, window: int = 0) -> list[torch.Tensor]:
    """Output and gradients of grouped queries, 96 wide."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn((1, heads, 1024, 96), generator=generator, device=DEVICE) for heads in (6, 2, 2)]
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    segments = Segments.of(lengths, DEVICE, 1024, rounded_count(len(lengths)))
    backbone = SimpleNamespace(config=Config(window), training=True, attention_backend=backend, modules=list)
    arguments = attention.attention_arguments(backbone, segments, "cuda", dtype, causal)
    out, _ = attention.attention(torch.nn.Identity(), *leaves, **arguments, sliding_window=window)
    (out.float() * torch.arange(out.numel(), device=DEVICE).reshape(out.shape).sin()).sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


def close(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).norm() < 1e-2 * reference.norm()


def choose(variant: str) -> str:
    """Choose the kernels in `varlen by KERNELS`; return the backend. What isn't installed is skipped."""
    backend, _, name = variant.partition(" by ")
    if not backend_available(backend):
        pytest.skip(f"{backend} isn't installed")
    if name:
        if (problem := kernels._missing_requirement(name)) is not None:
            pytest.skip(f"{name}: {problem}")
        assert kernels.select_kernels(Config(), name) == kernels.KERNELS[name]
    return backend


@pytest.mark.parametrize("lengths", CUTS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", [*(f"varlen by {name}" for name in kernels.KERNELS), "flex", "sdpa"])
def test_backends_equal_the_reference(variant: str, causal: bool, lengths: tuple[int, ...]) -> None:
    results = attend(choose(variant), lengths, causal, torch.bfloat16)
    close(results, attend("mask", lengths, causal, torch.float32))


def test_the_kernels_that_auto_chooses(recwarn: pytest.WarningsRecorder) -> None:
    """Those that are installed pass their trial."""
    print(kernels.select_kernels(Config()), torch.backends.cudnn.version())
    assert not [str(one.message) for one in recwarn if "can't be used" in str(one.message)]


@pytest.mark.parametrize("variant", ["varlen by fa4", "varlen by fa3", "varlen by fa2", "flex", "sdpa"])
def test_deterministic_gradients(variant: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        backend = choose(variant)
        first, *others = [attend(backend, CUTS[0], True, torch.bfloat16) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for results in others for one, other in zip(first, results, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["varlen by fa2", "flex", "sdpa"])
def test_windows(backend: str, causal: bool) -> None:
    results = attend(choose(backend), CUTS[0], causal, torch.bfloat16, window=100)
    close(results, attend("mask", CUTS[0], causal, torch.float32, window=100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_with_few_tokens_and_grouped_queries(dtype: torch.dtype) -> None:
    """A single short text: fewer than 128 tokens, and two query heads for each of two of keys."""
    generator, results = torch.Generator(DEVICE).manual_seed(0), []
    query, key, value = (torch.randn((1, heads, 100, 64), generator=generator, device=DEVICE) for heads in (4, 2, 2))
    for backend, kind in (("flex", dtype), ("sdpa", torch.float32)):
        segments = Segments.of((60, 40), DEVICE, 100, 2)
        config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=0)
        backbone = SimpleNamespace(config=config, training=False, attention_backend=backend, modules=list)
        arguments = attention.attention_arguments(backbone, segments, "cuda", kind, False)
        given = (x.to(kind) for x in (query, key, value))
        results.append(attention.attention(torch.nn.Identity(), *given, **arguments)[0].float())
    close(results[:1], results[1:])


@pytest.mark.parametrize("compiled", [True, False])
def test_the_loss_equals_that_with_full_logits(compiled: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn((3000, 128), generator=generator, device=DEVICE, requires_grad=True)
    weight = (0.1 * torch.randn((5000, 128), generator=generator, device=DEVICE)).requires_grad_()
    targets = torch.randint(5000, (3000,), generator=generator, device=DEVICE)
    targets[::5] = losses.IGNORE
    results = []
    for chunked in (True, False):
        if chunked:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = losses.cross_entropy_at_targets(hidden, weight, targets, None, compiled)
        else:
            loss = F.cross_entropy(hidden @ weight.T, targets, ignore_index=losses.IGNORE, reduction="sum")
        loss.backward()
        results.append([loss.detach(), hidden.grad, weight.grad])
        hidden.grad = weight.grad = None
    for result, reference in zip(*results, strict=True):
        assert (result - reference).norm() < 1e-2 * reference.norm()


def test_a_forward_pass_has_no_synchronization() -> None:
    """From the segments to the output of a compiled layer, the host never waits for the device."""
    from biphasic.model.forward import packed_forward
    from helpers.backbones import backbone

    model = backbone("llama").to(DEVICE)
    layers.compile_layers(model)
    tokens = torch.arange(21, device=DEVICE)

    def forward() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            packed_forward(model, tokens, Segments.of((5, 9, 1, 6), DEVICE, max_seqlen=21), causal=True).sum().backward()

    forward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
