"""What outputs depend on, as `check_attention` shows it: of families that are right, and of models that are made wrong."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from biphasic import check_attention, packed_attention
from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.model.probe import AttentionReport
from helpers.decoders import saved_decoder

SIZE: dict[str, Any] = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip


def ways(report: AttentionReport) -> dict[tuple[str, str], tuple[bool | None, bool | None, bool | None]]:
    return {(c.way, c.direction): (c.future, c.other_segments, c.padding) for c in report.checks}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt2"])
def test_decoders(family: str, tmp_path: Path) -> None:
    model: Any
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    else:
        model = saved_decoder(family, tmp_path)
    report = check_attention(model, require=("causal", "segments", "padding"))
    assert ways(report) == {
        ("input_ids alone", "own"): (False, None, None),
        ("attention_mask, right padding", "own"): (False, None, False),
        ("attention_mask, left padding", "own"): (False, None, False),
        ("position_ids", "own"): (False, True, None),
        ("position_ids, use_cache=False", "own"): (False, False, None),
        ("a mask of four dimensions", "causal"): (False, False, None),
        ("a mask of four dimensions", "bidirectional"): (True, False, None),
        ("biphasic.packed_attention", "causal"): (False, False, None),
        ("biphasic.packed_attention", "bidirectional"): (True, False, None),
    }
    assert report.problems == ["position_ids (own): sees other segments"]
    with pytest.raises(ValueError, match=r"required, but not so: bidirectional \(input_ids alone\)"):
        check_attention(model, require="bidirectional")


def test_an_encoder() -> None:
    report = check_attention(BertModel(BertConfig(**SIZE)), require=("bidirectional", "padding"))
    found = ways(report)
    assert found["input_ids alone", "own"] == (True, None, None)
    assert found["position_ids", "own"] == (True, True, None)
    assert found["biphasic.packed_attention", "bidirectional"] == (True, False, None)
    with pytest.raises(ValueError, match=r"required, but not so: causal \(input_ids alone\); segments \(position_ids"):
        check_attention(BertModel(BertConfig(**SIZE)), require=["causal", "segments"])


def test_a_recurrent_network_can_t_be_asked_for_segments() -> None:
    report = check_attention(MambaModel(MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2)))
    assert ways(report)["input_ids alone", "own"] == (False, None, None)
    errors = [check.error for check in report.checks if check.way == "biphasic.packed_attention"]
    assert errors == ["MambaModel can't be computed on packed segments: tokens attend to other segments"]
    assert "can't be called so" in str(report)


def leaky(part: str) -> Any:
    """An attention function with a fault: it ignores the mask's part for the future, for segments or for padding."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        if part == "future" and mask is None:
            return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": False})
        if part == "padding" and mask is not None:
            length = query.shape[2]
            mask = torch.ones(length, length, dtype=torch.bool).tril().expand_as(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    return attention


@pytest.mark.parametrize(
    ("part", "require", "way"), [("future", "causal", "input_ids alone"), ("padding", "padding", "left padding")]
)
def test_a_model_that_is_wrong(part: str, require: str, way: str, tmp_path: Path) -> None:
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(f"leaky_{part}", leaky(part))
    AttentionMaskInterface.register(f"leaky_{part}", sdpa_mask)
    model = saved_decoder("llama", tmp_path)
    model.set_attn_implementation(f"leaky_{part}")
    with pytest.raises(ValueError, match=rf"required, but not so: {require} \(.*{way}") as caught:
        check_attention(model, require=require)
    assert f"attention leaky_{part}" in str(caught.value)


def test_the_model_is_left_as_it_was_and_the_check_is_quick(tmp_path: Path) -> None:
    model = saved_decoder("llama", tmp_path).train()
    own, before = model.config._attn_implementation, {name: value.clone() for name, value in model.state_dict().items()}
    check_attention(model)
    start = time.process_time()
    check_attention(model)
    assert time.process_time() - start < 2
    assert model.training and model.config._attn_implementation == own
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="require: expected causal, bidirectional, segments, padding; got 'casual'"):
        check_attention(model, require="casual")


def test_packed_attention_computes_rows_of_segments(tmp_path: Path) -> None:
    """Each segment as the decoder computes it alone; in the other direction with a mask that hides nothing."""
    model = saved_decoder("llama", tmp_path).eval()
    tokens = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    segment_ids = torch.tensor([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])
    parts = [(0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 9))]
    with torch.no_grad():
        own = [model.model(tokens[row, part][None], use_cache=False).last_hidden_state[0] for row, part in parts]
        forward = packed_attention(model)
        hidden = forward(tokens, segment_ids, True)
        both = forward(tokens, segment_ids, False)
    assert hidden.shape == (2, 12, model.config.hidden_size)
    for (row, part), expected in zip(parts, own, strict=True):
        assert torch.allclose(hidden[row, part], expected, atol=1e-5)
        assert torch.allclose(both[row, part][-1], expected[-1], atol=1e-5) is False
    with pytest.raises(UserError, match="MambaModel can't be computed on packed segments: tokens attend to other"):
        packed_attention(MambaModel(MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2)))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_decoder("llama", tmp_path)
    assert main(["check-attention", str(tmp_path), "--require", "segments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama, attention sdpa, transformers ") and "WRONG: sees other segments" in lines[5]
    assert main(["check-attention", str(tmp_path), "--require", "bidirectional"]) == 1
    assert "required, but not so: bidirectional" in capsys.readouterr().out
    assert main(["check-attention", str(tmp_path / "nothing")]) == 2
    assert "can't be loaded" in capsys.readouterr().err
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    assert main(["check-attention", str(tmp_path)]) == 2
    assert f"model {tmp_path}: can't be loaded (" in capsys.readouterr().err
