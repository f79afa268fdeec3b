"""Every attention backend equals a mask over all tokens, forward and backward, causal and bidirectional."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from biphasic.model import attention
from biphasic.model.attention import attention_arguments, choose_backend
from biphasic.model.forward import packed_forward
from biphasic.model.segments import Segments
from helpers import attention_on_cpu  # noqa: F401 - kernels for CPUs
from helpers.backbones import backbone

CUTS = ((5, 9, 1, 6), (7, 7, 7), (21,), (1,) * 21)


class Backbone:
    """The values of a backbone that `attention_arguments` reads."""

    training = True

    def __init__(self, backend: str, **settings: Any):
        self.attention_backend, self.config = backend, SimpleNamespace(**settings)

    def modules(self) -> list[torch.nn.Module]:
        return []


def attend(backend: str, lengths: tuple[int, ...], causal: bool, kv_heads: int = 2, **keys: Any) -> tuple[torch.Tensor, ...]:
    """Output, and gradients of queries, keys and values, in float64, so that rounding doesn't matter."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    # With empty segments, as batches of pretraining have them.
    segments = Segments.of(lengths, torch.device("cpu"), count=len(lengths) + 3)
    arguments = attention_arguments(
        Backbone(backend, sliding_window=keys.get("sliding_window"), head_dim=8), segments, "cpu", torch.float64, causal
    )
    out, _ = attention.attention(torch.nn.Identity(), *inputs, **arguments, scaling=keys.pop("scaling", None), **keys)
    (out * torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape).sin()).sum().backward()
    return out.detach(), *(x.grad for x in inputs if x.grad is not None)


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    assert len(one) == len(other) == 4
    for a, b in zip(one, other, strict=True):
        # The weights under a softcap are fp32.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_equal_to_a_mask(backend: str, causal: bool, lengths: tuple[int, ...]) -> None:
    same(attend(backend, lengths, causal), attend("mask", lengths, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
@pytest.mark.parametrize("keys", [{"sliding_window": 3}, {"kv_heads": 4}, {"kv_heads": 1, "scaling": 0.7}], ids=str)
def test_windows_heads_and_scales(backend: str, causal: bool, keys: dict[str, Any]) -> None:
    same(attend(backend, CUTS[0], causal, **keys), attend("mask", CUTS[0], causal, **keys))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_softcap(backend: str, causal: bool) -> None:
    results = attend(backend, CUTS[0], causal, softcap=0.5)
    same(results, attend("mask", CUTS[0], causal, softcap=0.5))
    with pytest.raises(AssertionError):
        same(results, attend("mask", CUTS[0], causal))


def test_unsupported_options_are_refused() -> None:
    with pytest.raises(ValueError, match="attention varlen has no softcap: choose another, or auto"):
        attend("varlen", CUTS[0], True, softcap=0.5)
    with pytest.raises(ValueError, match="attention flex has no dropout"):
        attend("flex", CUTS[0], True, dropout=0.1)


@pytest.mark.parametrize("window", [0, 1, 100, 130, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(512,), (128, 128, 256), (1, 300, 90, 121, 77), (40,) * 15, (127, 129, 1, 255)])
def test_blocks_equal_those_of_all_pairs(lengths: tuple[int, ...], causal: bool, window: int) -> None:
    """FlexAttention's blocks, computed from segments, against all pairs of tokens."""
    segments = Segments.of(lengths, torch.device("cpu"))
    tokens, side = sum(lengths), attention.FLEX_BLOCK
    at = torch.arange(tokens)
    distance = at[:, None] - at[None, :]
    seen = segments.segment_index[:, None] == segments.segment_index[None, :]
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance.abs() < window
    count = -(-tokens // side)
    padded = torch.zeros(count * side, count * side, dtype=torch.bool)
    padded[:tokens, :tokens] = seen
    tiles = padded.unflatten(0, (count, side)).unflatten(2, (count, side))
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    mask = attention.block_mask(segments, causal, window)

    def dense(number: Any, indices: Any) -> torch.Tensor:
        blocks = torch.zeros(count, count, dtype=torch.bool)
        for row in range(count):
            blocks[row, indices[0, 0, row, : number[0, 0, row]].long()] = True
        return blocks

    full, part = dense(mask.full_kv_num_blocks, mask.full_kv_indices), dense(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full, every)
    # With a window, a few blocks without any pair are computed too, which costs only time.
    assert not (some & ~every & ~part).any()
    assert not (full & part).any()
    if not window:
        assert torch.equal(part, some & ~every)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "dropout", "available", "expected"),
    [
        (torch.bfloat16, 64, False, False, {"varlen", "flex"}, "varlen"),
        (torch.bfloat16, 64, False, False, {"flex"}, "flex"),
        (torch.bfloat16, 64, True, False, {"varlen", "flex"}, "flex"),
        (torch.float32, 64, False, False, {"varlen", "flex"}, "flex"),
        (torch.float32, 16, False, False, {"varlen", "flex"}, "flex"),
        (torch.float32, 8, False, False, {"varlen", "flex"}, "sdpa"),
        (torch.bfloat16, 8, False, False, {"varlen", "flex"}, "varlen"),
        (torch.bfloat16, 26, False, False, {"varlen", "flex"}, "flex"),
        (torch.bfloat16, 264, False, False, {"varlen", "flex"}, "flex"),
        (torch.bfloat16, 64, False, True, {"varlen", "flex"}, "sdpa"),
    ],
)
def test_auto_takes_the_first_backend_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_dim: int,
    softcap: bool,
    dropout: bool,
    available: set[str],
    expected: str,
) -> None:
    monkeypatch.setattr(attention, "backend_available", lambda backend: backend in available)
    config = SimpleNamespace(
        head_dim=head_dim, attn_logit_softcapping=50.0 if softcap else None, attention_dropout=0.1 if dropout else 0.0
    )
    assert choose_backend(config, "auto", "cuda", dtype, training=True) == expected
    assert choose_backend(config, "flex", "cuda", dtype, training=True) == "flex"
    assert choose_backend(config, "auto", "cpu", dtype, training=True) == "sdpa"
    if not softcap:
        config.attention_dropout = 0.0
        without = choose_backend(config, "auto", "cuda", dtype, training=True)
        config.attention_probs_dropout_prob = 0.1
        assert choose_backend(config, "auto", "cuda", dtype, training=False) == without


def test_flex_is_compiled_once_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With static shapes PyTorch stops compiling after eight, and its uncompiled form keeps all scores in memory."""
    torch._dynamo.reset()
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **named: compile_(*given, **named, backend=counter))
    attention.compiled_flex_attention.cache_clear()
    generator, frames = torch.Generator().manual_seed(0), list[int]()
    for tokens in range(300, 1500, 100):
        segments = Segments.of((tokens - 40, 40), torch.device("cpu"))
        query, key, value = (torch.randn((1, heads, tokens, 16), generator=generator) for heads in (4, 2, 2))
        output = attention.compiled_flex_attention()(
            query, key, value, None, attention.block_mask(segments, True, 0), 0.25, True
        )
        assert output.shape == query.shape
        frames.append(counter.frame_count)
    attention.compiled_flex_attention.cache_clear()
    assert len(frames) == 12 and set(frames) == {frames[0]}


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_no_backend_attends_to_other_segments(backend: str) -> None:
    """In a complete model, a segment's last token changes itself alone (causal), or its segment alone."""
    model, lengths = backbone("llama"), CUTS[0]
    model.attention_backend = backend  # pyright: ignore[reportAttributeAccessIssue]
    tokens = torch.arange(21)
    changed = tokens.clone()
    changed[13] = 95  # the last one of the second segment
    for causal, expected in ((True, [13]), (False, list(range(5, 14)))):
        with torch.no_grad():
            before, after = (
                packed_forward(model, t, Segments.of(lengths, tokens.device), causal) for t in (tokens, changed)
            )
        assert ((before - after).abs().amax(1) > 1e-5).nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize(("major", "expected"), [(7, "sdpa"), (8, "varlen"), (12, "varlen")])
def test_gpus_before_ampere_have_dense_attention(major: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither FlashAttention 2 nor Triton, which compiles FlexAttention, supports them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 5))
    assert choose_backend(SimpleNamespace(head_dim=64), "auto", "cuda", torch.bfloat16, training=True) == expected
