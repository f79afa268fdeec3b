"""An export has what llama.cpp's converter reads.

Read in `conversion/bert.py` and `conversion/base.py` of the llama.cpp in llama-cpp-python 0.3.36: the architecture
`EuroBertModel` (no other of EuroBERT's), weights with or without `model.`, of the encoder alone, sentence-transformers'
pooling by its older flags, and the tokens that the tokenizer gives a text. docs/export.md has the conversion, which was run
by hand.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig

from biphasic.data.tokenizer import load_tokenizer
from biphasic.model.language_model import from_hf_config
from helpers.exports import export_encoder, export_language_model
from helpers.tiny import ROOT, WORDS


def test_both_exports_can_be_converted(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretrained model's export has a language-model head; the documented code leaves the encoder."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=None,
    )
    model, tokenizer = from_hf_config(config, seed=1), load_tokenizer(str(dataset / "tokenizer"))
    export_encoder(model.backbone, tokenizer, tmp_path / "encoder")
    export_language_model(model, tokenizer, tmp_path / "OUT")
    page = (ROOT / "docs" / "export.md").read_text()
    code = re.search(r"```python\n(# The encoder alone.*?)```", page, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(code[1])
    for folder in (tmp_path / "encoder", tmp_path / "OUT-encoder"):
        written = json.loads((folder / "config.json").read_text())
        assert written["architectures"] == ["EuroBertModel"]
        with safe_open(folder / "model.safetensors", "pt") as file:
            names = list(file.keys())
            assert torch.equal(file.get_tensor("norm.weight"), model.backbone.norm.weight)  # pyright: ignore
        assert {name.split(".")[0] for name in names} == {"embed_tokens", "layers", "norm"}
        assert len(names) == 2 + 9
        assert written["rope_parameters"]["rope_theta"] == 10000
        pooling = next(module for module in json.loads((folder / "modules.json").read_text()) if "Pooling" in module["type"])
        assert json.loads((folder / pooling["path"] / "config.json").read_text())["pooling_mode_mean_tokens"] is True
        assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [5, 6]
