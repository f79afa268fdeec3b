"""No token sees what it must not, in either direction, for every family that is supported."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from backbones import SMALL, backbone
from biphasic.model import attention
from biphasic.model.backbone import TESTED_FAMILIES
from biphasic.model.packed import encode, mean_pool
from biphasic.model.segments import Segments

LENGTHS = (5, 9, 1, 6)


def hidden(model: torch.nn.Module, tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    with torch.no_grad():
        return encode(model, tokens, Segments.of(LENGTHS, tokens.device), causal)


@pytest.mark.parametrize("family", TESTED_FAMILIES)
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_changed_token_reaches(family: str, causal: bool) -> None:
    model = backbone(family)
    tokens = torch.arange(sum(LENGTHS)) % 90
    before = hidden(model, tokens, causal)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for changed in range(len(tokens)):
        other = tokens.clone()
        other[changed] = 95
        moved = (hidden(model, other, causal) - before).abs().amax(1) > 1e-5
        same = owner == owner[changed]
        expected = same & (torch.arange(len(tokens)) >= changed) if causal else same
        assert torch.equal(moved, expected), (changed, moved, expected)


@pytest.mark.parametrize("family", TESTED_FAMILIES)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_is_the_documents_one_by_one(family: str, causal: bool) -> None:
    model = backbone(family)
    tokens = (torch.arange(sum(LENGTHS)) * 7) % 97
    together = hidden(model, tokens, causal).split(LENGTHS)
    for alone, packed in zip(tokens.split(LENGTHS), together, strict=True):
        with torch.no_grad():
            output = encode(model, alone, Segments.of([len(alone)], alone.device), causal)
        torch.testing.assert_close(output, packed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_sliding_window(causal: bool) -> None:
    model = backbone("mistral", sliding_window=3, num_hidden_layers=1)
    tokens = torch.arange(9)
    segments = Segments.of([9], tokens.device)
    with torch.no_grad():
        before = encode(model, tokens, segments, causal)
        changed = tokens.clone()
        changed[4] = 95
        moved = (encode(model, changed, segments, causal) - before).abs().amax(1) > 1e-5
    assert moved.nonzero()[:, 0].tolist() == ([4, 5, 6] if causal else [2, 3, 4, 5, 6])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "olmo2", "smollm3"])
def test_causal_is_the_family_s_own_forward(family: str) -> None:
    ours = backbone(family)
    config = AutoConfig.for_model(family, **SMALL)
    from transformers import AutoModel

    theirs = AutoModel.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.arange(11)
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).last_hidden_state[0]
        found = encode(ours, tokens, Segments.of([11], tokens.device), causal=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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
