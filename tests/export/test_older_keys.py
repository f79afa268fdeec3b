"""ModernBERT's older keys in config.json, which text-embeddings-inference and transformers 4 read alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, ModernBertConfig

from biphasic.data.tokenizer import load_tokenizer
from biphasic.export.finetuned import export_finetuned
from biphasic.model.backbone import load_hf_config
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.language_model import from_hf_config
from helpers import families
from helpers.backbones import OTHER_SIZES, SMALL
from helpers.exports import export_language_model

FULL, LOCAL = "full_attention", "sliding_attention"
BOTH: dict[Any, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 90_000.0}, LOCAL: {"rope_type": "default", "rope_theta": 20_000.0}
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 30_000.0, "factor": 2.0}
OLDER = ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("modernbert", {"global_attn_every_n_layers": 2, "rope_parameters": BOTH}, [90_000.0, 20_000.0, 2]),
        ("modernbert-decoder", {"global_attn_every_n_layers": 2, "rope_parameters": BOTH}, [90_000.0, 20_000.0, 2]),
        ("modernbert", {"global_attn_every_n_layers": 7, "rope_parameters": BOTH}, [90_000.0, 20_000.0, 5]),
        ("modernbert", {"global_attn_every_n_layers": 1}, [160_000.0, 10_000.0, 1]),
        # What older software can't compute is an error there.
        ("modernbert", {"layer_types": [LOCAL, FULL, LOCAL, FULL, LOCAL], "rope_parameters": BOTH}, [90e3, 20e3, None]),
        ("modernbert", {"rope_parameters": {FULL: LINEAR, LOCAL: LINEAR}}, [30e3, 30e3, None]),
    ],
)
def test_the_older_keys(family: str, changes: dict[str, Any], expected: list[Any], tmp_path: Path) -> None:
    families.bert_tokenizer(tmp_path / "words")
    sizes = {**SMALL, "vocab_size": 300, "num_hidden_layers": 5, **OTHER_SIZES.get(family, {}), **changes}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
    model = from_hf_config(AutoConfig.for_model(family, **{**sizes, **special}), seed=1).eval()
    export_language_model(model, load_tokenizer(str(tmp_path / "words")), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [content[key] for key in OLDER] == expected
    loaded = load_hf_config(str(tmp_path / "out"))
    assert loaded.rope_parameters == content["rope_parameters"] and loaded.layer_types == content["layer_types"]


def test_a_finetuned_encoder_of_its_own_family_has_them_too(tmp_path: Path) -> None:
    config = ModernBertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, local_attention=6, layer_types=[FULL, LOCAL, FULL, LOCAL, FULL],
        rope_parameters=BOTH, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "own")
    families.bert_tokenizer(tmp_path / "own")
    encoder, out = load_encoder(str(tmp_path / "own")), tmp_path / "out"
    export_finetuned(encoder, TextHead(32, 2), ["a", "b"], out, lambda **_: "card", prompts={}, max_length=60)
    content = json.loads((out / "config.json").read_text())
    assert [content[key] for key in OLDER] == [90_000.0, 20_000.0, 2]
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 60
