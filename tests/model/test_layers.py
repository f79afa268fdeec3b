"""Compiled and recomputed layers give the same results, with one compilation for each phase and none for a batch."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from biphasic.config.pretrain import MAX_AUTOTUNE
from biphasic.model import layers, losses
from biphasic.model.forward import packed_forward
from biphasic.model.language_model import LanguageModel
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments
from helpers.backbones import backbone, gradients


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without code generation: graphs, guards and gradients are real, and no C++ is compiled."""
    torch._dynamo.reset()
    counters.clear()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **named: compile_(*given, **named, backend="aot_eager"))


@pytest.mark.parametrize(
    ("backend", "family", "kinds"),
    [
        ("varlen", "llama", 1),
        ("flex", "gemma2", 2),
        ("flex", "modernbert", 2),
        ("varlen", "modernbert", 2),
        ("varlen", "modernbert-decoder", 2),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_one_compilation_for_a_phase_and_none_for_a_batch(backend: str, family: str, kinds: int) -> None:
    """Layers of one kind share a compilation; Gemma 2 has two kinds."""
    model = backbone(family)
    expected = gradients(model, "mask")
    layers.compile_layers(model)
    graphs: list[int] = []
    results = gradients(model, backend, graphs)
    # The final norm is compiled once, for both phases.
    clm, mlm = kinds + 1, 2 * kinds + 1
    assert graphs == [clm] * 4 + [mlm] * 4
    assert not counters["graph_break"]
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.usefixtures("compiler")
def test_dense_attention_breaks_the_graph_of_a_compiled_layer() -> None:
    model = backbone("llama")
    expected = gradients(model, "mask")
    layers.compile_layers(model)
    graphs: list[int] = []
    results = gradients(model, "sdpa", graphs)
    assert graphs[1] == graphs[3]
    assert graphs[4] == graphs[7] <= graphs[3] + 1
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.slow  # half a minute of C++; the loss below runs generated code, the tests above compile the layers
@pytest.mark.parametrize("mode", ["default", MAX_AUTOTUNE])
def test_the_real_compiler_gives_the_same_results(mode: str) -> None:
    torch._dynamo.reset()
    model = backbone("llama", num_hidden_layers=1)
    expected = gradients(model, "mask")
    layers.compile_layers(model, mode)
    for result, reference in zip(gradients(model, "varlen"), expected, strict=True):
        assert (result - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_layers(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are the same, and the forward of the given layers runs twice."""
    torch._dynamo.reset()
    if compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **named: function)
    model = backbone("llama").train()
    expected = gradients(model, "sdpa")
    calls = [0] * 3
    for index, layer in enumerate(model.layers):  # pyright: ignore[reportArgumentType]
        forward = layer.mlp.forward

        def counting(x: torch.Tensor, index: int = index, forward: object = forward) -> torch.Tensor:
            calls[index] += 1
            return forward(x)  # pyright: ignore

        layer.mlp.forward = counting
    if compiled:
        layers.compile_layers(model)
    layers.recompute_layers(model, [1])
    assert layers.recomputed_layers(model) == 1
    results = gradients(model, "sdpa")
    assert calls == [8, 16, 8]
    assert all(torch.equal(result, reference) for result, reference in zip(results, expected, strict=True))


# Each is half a minute of C++; without softcap, what is compiled is a part of the same.
@pytest.mark.parametrize("softcap", [5.0, pytest.param(None, marks=pytest.mark.slow)])
def test_the_compiled_loss_is_equal_and_compiled_once(softcap: float | None) -> None:
    compare_losses(softcap)


@pytest.mark.usefixtures("compiler")
def test_the_compiled_loss_without_softcap() -> None:
    compare_losses(None)


def compare_losses(softcap: float | None) -> None:
    """Compare the compiled loss and its gradients with the other for several numbers of targets: one graph for all."""
    losses._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    for count in (30, 17, 9):
        targets = torch.randint(50, (30,))
        targets[count:] = IGNORE
        results = []
        for compiled in (True, False):
            loss = losses.cross_entropy_at_targets(hidden, weight, targets, softcap, compiled)
            (0.37 * loss).backward()
            results.append([loss.detach(), hidden.grad, weight.grad])
            hidden.grad = weight.grad = None
        for result, reference in zip(*results, strict=True):
            torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    losses._compiled.cache_clear()  # of this test's compiler


@pytest.mark.usefixtures("compiler")
def test_a_bf16_residual_needs_no_compilation_of_its_own() -> None:
    """Results differ from those in fp32 by rounding, also where layers are recomputed."""
    model = backbone("llama").train()
    expected = gradients(model, "mask")
    layers.compile_layers(model)
    layers.round_residual(model)
    layers.recompute_layers(model, [0, 2])
    assert layers.recomputed_layers(model) == 2
    graphs: list[int] = []
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients(model, "varlen", graphs)
    assert graphs == [2] * 4 + [3] * 4
    for result, reference in zip(results, expected, strict=True):
        assert 1e-4 * reference.norm() < (result - reference).norm() < 3e-2 * reference.norm()


def test_names_of_parameters_are_kept() -> None:
    model = backbone("llama")
    names = list(LanguageModel(model, torch.nn.Linear(32, 97, bias=False)).state_dict())
    layers.compile_layers(model)
    layers.round_residual(model)
    layers.recompute_layers(model, [0])
    assert list(LanguageModel(model, torch.nn.Linear(32, 97, bias=False)).state_dict()) == names


@pytest.mark.usefixtures("compiler")
def test_ddp_doesn_t_split_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would compile the parts between DDP's buckets separately, without fusing across them."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    def refuse(*_: object) -> None:
        raise AssertionError("a layer is split")

    monkeypatch.setattr(DDPOptimizer, "compile_fn", refuse)
    alone = not torch.distributed.is_initialized()  # Composer leaves its group to other tests of this process
    if alone:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch._dynamo.config.patch(optimize_ddp=True):  # PyTorch's default
            model = backbone("llama")
            layers.compile_layers(model)
            DistributedDataParallel(Packed(model))(torch.arange(21)).sum().backward()
    finally:
        if alone:
            torch.distributed.destroy_process_group()
    assert counters["stats"]["unique_graphs"] == 2  # the layers' and the norm's


class Packed(torch.nn.Module):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        model.attention_backend = "varlen"  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return packed_forward(self.model, tokens, Segments.of((5, 9, 1, 6), tokens.device, 21), causal=True)
