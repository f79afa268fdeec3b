"""Kernels of PyTorch's attention: which are chosen, that they are tried first, and for how many shapes they are prepared."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from biphasic.errors import UserError
from biphasic.model import kernels
from biphasic.model.attention import attention_arguments
from biphasic.model.kernels import KERNELS, avoid_plans, select_kernels, try_attention
from biphasic.model.segments import Segments
from biphasic.objectives.batch import segments_of
from helpers import attention_on_cpu  # noqa: F401 - kernels for CPUs

CPU = torch.device("cpu")


class Config:
    hidden_size, num_attention_heads, num_key_value_heads = 64, 4, 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """A GPU machine whose kernels are only named. `machine(...)` describes it and returns the list of activations."""

    def build(major: int = 9, modules: tuple[str, ...] = (), cudnn: int = 92600, broken: tuple[str, ...] = ()) -> list[str]:
        active: list[str] = []

        def try_attention(*_: Any) -> str:
            name = "cudnn" if torch._C._get_cudnn_sdp_enabled() else active[-1]
            if name in broken:
                raise RuntimeError("ptxas: no such instruction\nlong details")
            return KERNELS[name]

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(kernels, "_has_module", lambda name: name in modules)
        monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", lambda name: active.append(name.lower()))
        monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda _raise_warn: active.append("fa2"))
        monkeypatch.setattr(kernels, "try_attention", try_attention)
        return active

    enabled = torch._C._get_cudnn_sdp_enabled()
    yield build
    kernels._selected = None
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.parametrize(
    ("machine_is", "expected"),
    [
        ({"modules": ("flash_attn.cute", "flash_attn_interface")}, "fa4"),
        ({"modules": ("flash_attn.cute",), "major": 10}, "fa4"),
        ({"modules": ("flash_attn_interface",)}, "fa3"),
        ({"modules": ("flash_attn_interface",), "major": 10}, "cudnn"),
        ({}, "cudnn"),
        ({"cudnn": 92400}, "fa2"),  # NaN for empty segments
        ({"major": 8, "modules": ("flash_attn.cute",)}, "fa2"),
        ({"major": 12, "modules": ("flash_attn.cute",)}, "fa2"),
    ],
)
def test_auto_takes_the_first_kernels_that_this_machine_supports(
    machine: Callable[..., list[str]], machine_is: dict[str, Any], expected: str, recwarn: pytest.WarningsRecorder
) -> None:
    machine(**machine_is)
    assert select_kernels(Config) == KERNELS[expected]
    assert torch._C._get_cudnn_sdp_enabled() == (expected == "cudnn")  # PyTorch would prefer it
    assert not recwarn.list


def test_kernels_that_fail_their_trial_are_named_and_skipped(machine: Callable[..., list[str]]) -> None:
    active = machine(modules=("flash_attn.cute",), broken=("fa4", "cudnn"))
    with pytest.warns(UserWarning, match="trying other kernels") as warned:
        assert select_kernels(Config) == "FlashAttention 2"
    assert [str(one.message) for one in warned] == [
        f"attention: {name} can't be used (RuntimeError: ptxas: no such instruction); trying other kernels"
        for name in ("FlashAttention 4", "cuDNN")
    ]
    assert active[-1] == "fa2" and not torch._C._get_cudnn_sdp_enabled()


def test_requested_kernels_are_used_or_refused(machine: Callable[..., list[str]]) -> None:
    machine(modules=("flash_attn.cute",), broken=("fa4",))
    assert select_kernels(Config, "fa2") == "FlashAttention 2"  # an installed FlashAttention 4 is not used
    with pytest.raises(UserError, match=r"compute\.varlen_kernels: FlashAttention 4 can't be used: RuntimeError: ptxas"):
        select_kernels(Config, "fa4")
    with pytest.raises(UserError, match=r"FlashAttention 3 can't be used: the module flash_attn_interface isn't"):
        select_kernels(Config, "fa3")
    machine(broken=("cudnn", "fa2"))
    with (
        pytest.warns(UserWarning, match="cuDNN"),
        pytest.raises(UserError, match=r"FlashAttention 2 can't be used: .*attention: flex"),
    ):
        select_kernels(Config)


def test_deterministic_runs_don_t_use_cudnn(machine: Callable[..., list[str]]) -> None:
    machine()
    torch.use_deterministic_algorithms(True)
    try:
        assert select_kernels(Config) == "FlashAttention 2"
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_kernels_than_the_requested_ones_are_refused(
    machine: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older PyTorch has cuDNN's attention, and calls FlashAttention all the same."""
    machine()
    monkeypatch.setattr(kernels, "try_attention", lambda *_: "FlashAttention 2")
    with pytest.raises(UserError, match="cuDNN can't be used: PyTorch ran FlashAttention 2"):
        select_kernels(Config, "cudnn")


def test_the_trial_accepts_right_results_and_names_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_attention(Config, CPU) == "FlashAttention 2"
    original = kernels.varlen_attn

    def by_cudnn(*given: Any, **named: Any) -> Any:
        with torch.profiler.record_function("aten::_cudnn_attention_forward"):
            return original(*given, **named)

    monkeypatch.setattr(kernels, "varlen_attn", by_cudnn)
    assert try_attention(Config, CPU) == "cuDNN"


@pytest.mark.parametrize("fault", ["NaN at empty segments", "gradient", "bidirectional only"])
def test_the_trial_finds_wrong_results(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.varlen_attn

    def wrong(query: torch.Tensor, *given: Any, window_size: tuple[int, int], **named: Any) -> Any:
        if fault == "bidirectional only":
            window_size = (-1, -1)
        output = original(query, *given, window_size=window_size, **named)
        assert isinstance(output, torch.Tensor)
        if fault == "gradient":
            return output + 0.1 * (query - query.detach())
        return output if fault == "bidirectional only" else output.index_fill(0, torch.tensor([150]), float("nan"))

    monkeypatch.setattr(kernels, "varlen_attn", wrong)
    with pytest.raises(RuntimeError, match="wrong results"):
        try_attention(Config, CPU)


def test_cudnn_is_off_unless_a_run_has_chosen_it(machine: Callable[..., list[str]]) -> None:
    """In fine-tuning and evaluation nearly every batch has another shape, and cuDNN prepares a plan for each."""
    machine()
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default
    backbone = SimpleNamespace(config=Config, training=True, attention_backend="varlen")
    attention_arguments(backbone, Segments.of((5, 16), CPU), "cuda", torch.bfloat16, causal=False)
    assert not torch._C._get_cudnn_sdp_enabled()
    select_kernels(Config, "cudnn")
    avoid_plans()
    assert torch._C._get_cudnn_sdp_enabled()


@pytest.mark.parametrize("rows", [8, 16, 48])
def test_an_epoch_has_few_shapes(rows: int) -> None:
    """cuDNN prepares a plan for each number of segments, number of tokens and maximum length."""
    generator, length = torch.Generator().manual_seed(0), 2048
    shapes, counts = set(), set()
    inputs = torch.zeros((rows, length), dtype=torch.int64)
    for _ in range(500):
        lengths: list[list[int]] = []
        for _ in range(rows):
            row: list[int] = []
            while (left := length - sum(row)) > 30:  # the rest is padding
                row.append(min(left, max(16, int(600 * torch.randn((), generator=generator).exp()))))
            lengths.append(row)
        segments = segments_of({"input_ids": inputs, "lengths": lengths})
        counts.add(len(segments.lengths))
        shapes.add((segments.cu_seqlens.numel(), segments.position_ids.numel(), segments.max_seqlen))
        assert segments.cu_seqlens[len(segments.lengths) :].unique().tolist() == [rows * length]
    assert len(counts) > 20 and len(shapes) <= 6
