"""Any supported decoder's folder is a start: same loss as its own code, room for a mask token, errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import load_tokenizer
from biphasic.model.backbone import TESTED_FAMILIES, load_language_model
from biphasic.model.segments import Segments
from biphasic.objectives.clm import clm_targets
from conftest import Write
from tiny import WORDS, config_of, losses, train

DECODERS = [family for family in TESTED_FAMILIES if family != "eurobert"]


def decoder(family: str, folder: Path) -> Any:
    """A small random model of the family, saved as the hub has it."""
    config = AutoConfig.for_model(
        family,
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=None,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", DECODERS)
def test_clm_loss_is_the_family_s_own(family: str, tmp_path: Path) -> None:
    theirs = decoder(family, tmp_path)
    ours = load_language_model(str(tmp_path))
    tokens = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=tokens, labels=tokens).loss
    targets = clm_targets(tokens, torch.ones_like(tokens))
    total, count = ours(tokens.flatten(), targets.flatten(), Segments.of([17] * 3, tokens.device), causal=True)
    assert abs(float(total / count) - float(expected)) < 1e-5
    assert ours.architecture().parameters <= sum(p.numel() for p in ours.parameters()) + 2 * 2 * 32


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_widening_keeps_what_was_there(family: str, tmp_path: Path) -> None:
    """Llama's head is apart from the embedding, Gemma's is tied to it, and both stay so."""
    decoder(family, tmp_path)
    before, after = load_language_model(str(tmp_path)), load_language_model(str(tmp_path))
    after.widen(WORDS + 3)
    for name in ("backbone.embed_tokens.weight", "lm_head.weight"):
        old, new = before.state_dict()[name], after.state_dict()[name]
        assert new.shape[0] == WORDS + 3
        assert torch.equal(new[:WORDS], old)
        torch.testing.assert_close(new[WORDS], old.mean(0))
    tied = [model.lm_head.weight is model.backbone.get_input_embeddings().weight for model in (before, after)]
    assert tied == [family == "gemma2"] * 2


def test_a_decoder_without_a_mask_token_becomes_an_encoder(write_yaml: Write, tmp_path: Path) -> None:
    decoder("qwen3", tmp_path / "qwen3")
    path = write_yaml(
        model={"init_from": str(tmp_path / "qwen3")}, objective__phases=[{"name": "mlm"}], optimizer__lr=1e-2
    )
    local = tmp_path / "data" / "tokenizer"
    old = PreTrainedTokenizerFast.from_pretrained(local)
    vocabulary = old.backend_tokenizer
    for file in local.iterdir():
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<|eos|>").save_pretrained(local)
    # The small vocabulary has the mask's name in it already; take that away, as in a decoder's tokenizer.
    text = (local / "tokenizer.json").read_text().replace("<|mask|>", "w_unused")
    (local / "tokenizer.json").write_text(text)
    tokenizer = load_tokenizer(str(local))
    assert tokenizer.mask_id == WORDS
    found = losses(train(config_of(path)))
    assert found[-1] < found[0]
    trained = load_language_model(str(tmp_path / "runs" / "run" / "checkpoints" / "ba12-rank0.pt"))
    assert trained.config.model_type == "qwen3"
    assert trained.lm_head.weight.shape[0] == WORDS + 1


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    decoder("llama", tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"cut off")
    (tmp_path / "empty").mkdir()
    for name in ("llama", "empty", "missing"):
        with pytest.raises(UserError, match=f"{name}: can't be loaded") as caught:
            load_language_model(str(tmp_path / name))
        assert "\n" not in str(caught.value)
