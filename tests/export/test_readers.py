"""What other software would compute wrongly from an export is an error in it (benchmarks/readers.py has who reads what)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    pipeline,
)

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from biphasic.export.finetuned import export_finetuned
from biphasic.export.onnx import export_onnx
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.language_model import from_hf_config
from biphasic.model.text_tokenizer import TextTokenizer
from helpers import families
from helpers.exports import export_language_model
from helpers.tiny import LENGTH, WORDS

REQUIRED_BY_TEI = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_activation "
    "max_position_embeddings initializer_range initializer_cutoff_factor norm_eps norm_bias pad_token_id "
    "eos_token_id bos_token_id cls_token_id sep_token_id global_rope_theta attention_bias attention_dropout "
    "global_attn_every_n_layers local_attention local_rope_theta classifier_activation"
)
"""Keys without which TEI refuses a ModernBERT (its `backends/candle/src/models/modernbert.rs`)."""
TEXTS = ["w5 w6 w7 w8", "w9"]


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


def encoder_of(tokenizer: Tokenizer, **changes: Any) -> Encoder:
    """An encoder with weights that are large enough for errors to show, in EuroBERT's format or with code."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, pad_token_id=None, initializer_range=0.2, **changes,
    )  # fmt: skip
    return Encoder(from_hf_config(config, seed=1).backbone, TextTokenizer(tokenizer, LENGTH))


def export(encoder: Encoder, out: Path, labels: int, refuse_pairs: bool) -> Path:
    torch.manual_seed(0)
    names = [f"label{number}" for number in range(labels)]
    options: dict[str, Any] = {"prompts": {}, "max_length": LENGTH, "refuse_pairs": refuse_pairs}
    export_finetuned(encoder, TextHead(32, labels), names, out, lambda **_: "card", **options)
    return out


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=["eurobert", "code"])
def test_a_pair_is_an_error_for_a_model_of_pairs(changes: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Training read both texts as one, by a template; a tokenizer's pair has other tokens."""
    encoder = encoder_of(tokenizer, **changes)
    plain, guarded = (str(export(encoder, tmp_path / name, 1, name == "guarded")) for name in ("plain", "guarded"))
    cross: Any = CrossEncoder(guarded, device="cpu", trust_remote_code=True)
    with pytest.raises(IndexError):
        cross.predict([("w5 w6", "w7 w8")])
    classify: Any = pipeline("text-classification", guarded, trust_remote_code=True)
    with pytest.raises(IndexError):
        classify({"text": "w5 w6", "text_pair": "w7 w8"})
    # One text is read as before, and the head's weights too.
    assert classify(TEXTS) == pipeline("text-classification", plain, trust_remote_code=True)(TEXTS)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (plain, guarded)]
    assert tokenizers[0](TEXTS).input_ids == tokenizers[1](TEXTS).input_ids == tokenizer.encode(TEXTS)
    assert "README.md has it" in tokenizers[1]("w5", "w6").tokens()[1]
    assert load_tokenizer(guarded).sha256 == load_tokenizer(plain).sha256
    # A classifier of single texts may still be trained further on pairs.
    assert len(tokenizers[0]("w5", "w6").input_ids) == 2


def test_a_pair_is_an_error_around_special_tokens_too(tmp_path: Path) -> None:
    """The graph of a ModernBERT has the head that no class of transformers has."""
    encoder = load_encoder(str(families.modernbert(tmp_path / "start")))
    out = export(encoder, tmp_path / "out", 2, True)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("w5 w6").input_ids == AutoTokenizer.from_pretrained(tmp_path / "start")("w5 w6").input_ids
    assert loaded("w5 w6").input_ids[0] == 2
    assert max(loaded("w5", "w6").input_ids) == 2**31 - 1


def test_the_graph_of_a_classifier_can_be_quantized(tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = export(encoder_of(tokenizer), tmp_path / "out", 3, False)
    graph = export_onnx(out)
    quantize_dynamic(graph, tmp_path / "int8.onnx")
    ids = torch.tensor([tokenizer.encode(TEXTS[:1])[0]])
    inputs = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids.numpy())}
    results = [
        onnxruntime.InferenceSession(str(file)).run(["logits"], inputs)[0] for file in (graph, tmp_path / "int8.onnx")
    ]
    with torch.no_grad():
        expected = AutoModelForSequenceClassification.from_pretrained(out)(ids).logits.numpy()
    assert np.abs(results[0] - expected).max() < 1e-4
    assert 0 < np.abs(results[1] - expected).max() < 0.1


def test_no_software_takes_a_default_for_irregular_layers(tmp_path: Path) -> None:
    """llama.cpp's converter writes no period for null, and its loader takes 3. It refuses an object, as the others do."""
    config = ModernBertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, local_attention=16, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2,
        eos_token_id=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    families.bert_tokenizer(tmp_path / "tokenizer")
    export_language_model(from_hf_config(config, seed=1), load_tokenizer(str(tmp_path / "tokenizer")), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert isinstance(content["global_attn_every_n_layers"], dict)
    # The name that vLLM and llama.cpp read; its converter writes another kind of norm for `norm_eps` alone.
    assert content["layer_norm_eps"] == content["norm_eps"] == 1e-5
    assert set(content) >= set(REQUIRED_BY_TEI.split())


def test_a_decoder_that_is_already_bidirectional_is_refused_by_name(tmp_path: Path) -> None:
    """As EmbeddingGemma is. Its windows are half as long as the number in its config.json."""
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    config = Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_bidirectional_attention=True)
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"gemma3_text isn't supported: .* sets use_bidirectional_attention"):
        load_language_model(str(tmp_path))
