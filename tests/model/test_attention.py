"""Causal and bidirectional attention of every supported family, token by token."""

import pytest
import torch
from transformers import AutoConfig

from biphasic.model import attention
from biphasic.model.forward import packed_forward
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from helpers.backbones import SMALL, TESTED_FAMILIES, backbone

LENGTHS = (5, 9, 1, 6)


def hidden(model: torch.nn.Module, tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    with torch.no_grad():
        return packed_forward(model, tokens, Segments.of(LENGTHS, tokens.device), causal)


@pytest.mark.parametrize("family", TESTED_FAMILIES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_changed_token_changes_only_what_attends_to_it(family: str, causal: bool) -> None:
    model = backbone(family)
    tokens = torch.arange(sum(LENGTHS)) % 90
    before = hidden(model, tokens, causal)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for changed in range(len(tokens)):
        changed_tokens = tokens.clone()
        changed_tokens[changed] = 95
        moved = (hidden(model, changed_tokens, causal) - before).abs().amax(1) > 1e-5
        same = segment == segment[changed]
        expected = same & (torch.arange(len(tokens)) >= changed) if causal else same
        assert torch.equal(moved, expected), (changed, moved, expected)


@pytest.mark.parametrize("family", TESTED_FAMILIES)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_equals_one_document_at_a_time(family: str, causal: bool) -> None:
    model = backbone(family)
    tokens = (torch.arange(sum(LENGTHS)) * 7) % 97
    packed = hidden(model, tokens, causal).split(LENGTHS)
    for alone, part in zip(tokens.split(LENGTHS), packed, strict=True):
        with torch.no_grad():
            output = packed_forward(model, alone, Segments.of([len(alone)], alone.device), causal)
        torch.testing.assert_close(output, part, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_sliding_window(causal: bool) -> None:
    model = backbone("mistral", sliding_window=3, num_hidden_layers=1)
    tokens = torch.arange(9)
    segments = Segments.of([9], tokens.device)
    with torch.no_grad():
        before = packed_forward(model, tokens, segments, causal)
        changed = tokens.clone()
        changed[4] = 95
        moved = (packed_forward(model, changed, segments, causal) - before).abs().amax(1) > 1e-5
    assert moved.nonzero()[:, 0].tolist() == ([4, 5, 6] if causal else [2, 3, 4, 5, 6])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "olmo2", "smollm3"])
def test_causal_equals_the_family_s_own_forward(family: str) -> None:
    model = backbone(family)
    config = AutoConfig.for_model(family, **SMALL)
    from transformers import AutoModel

    original = AutoModel.from_config(config, attn_implementation="eager").eval()
    original.load_state_dict(model.state_dict())
    tokens = torch.arange(11)
    with torch.no_grad():
        expected = original(input_ids=tokens[None]).last_hidden_state[0]
        hidden_states = packed_forward(model, tokens, Segments.of([11], tokens.device), causal=True)
    torch.testing.assert_close(hidden_states, expected, atol=1e-5, rtol=1e-5)


def test_a_call_without_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="packed segments"):
        backbone("llama")(input_ids=torch.arange(4)[None])


def test_mean_pool_and_positions() -> None:
    segments = Segments.of([2, 3], torch.device("cpu"))
    assert segments.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert segments.cu_seqlens.tolist() == [0, 2, 5]
    assert segments.cu_seqlens.dtype == torch.int32
    pooled = mean_pool(torch.arange(10.0).reshape(5, 2), segments)
    assert pooled.tolist() == [[1.0, 2.0], [6.0, 7.0]]


def test_registering_twice_is_harmless() -> None:
    attention.register()
    attention.register()
