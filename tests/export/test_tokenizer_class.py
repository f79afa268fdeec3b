"""An export's tokenizer as AutoTokenizer loads it: the ids of tokenizer.json, and the names of all special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig

from biphasic.data.tokenizer import load_tokenizer
from biphasic.export.finetuned import export_finetuned
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.language_model import from_hf_config
from helpers.exports import export_encoder

pytestmark = pytest.mark.usefixtures("hub_is_offline")

TEXT = "The Quick brown fox jumps over 12345 lazy dogs, don't it?  你好 naïve"
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
NAMES = {f"{role}_token": f"<my {role}>" for role in ROLES}
SIZES: dict[str, Any] = {"vocab_size": 150, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


def write_tokenizer(folder: Path, settings: dict[str, Any], special_tokens_map: dict[str, Any]) -> list[int]:
    """Write a tokenizer that splits and normalizes as none of transformers' classes; return the ids of `TEXT`."""
    tokenizer = Tokenizer(models.BPE(unk_token=NAMES["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    special = list(NAMES.values())
    trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT.split("你")[0]] * 5, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    return tokenizer.encode(TEXT, add_special_tokens=False).ids


def export(finetuned: bool, source: Path, out: Path) -> None:
    """Export a model in its own family's class, or in EuroBERT's format."""
    if finetuned:
        BertModel(BertConfig(**SIZES)).save_pretrained(source)
        head = TextHead(32, 2)
        export_finetuned(load_encoder(str(source)), head, ["a", "b"], out, lambda **_: "card", prompts={}, max_length=60)
    else:
        config = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=None)
        export_encoder(from_hf_config(config, 0).backbone, load_tokenizer(str(source)), out)


@pytest.mark.parametrize("finetuned", [False, True])
@pytest.mark.parametrize(
    "name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "CohereTokenizer", "GPT2Tokenizer", "NoSuchTokenizer"]
)
def test_ids_are_those_of_tokenizer_json(name: str, finetuned: bool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    expected = write_tokenizer(source, {"tokenizer_class": name, "add_prefix_space": True, **NAMES}, {})
    export(finetuned, source, out)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded(TEXT).input_ids == expected == load_tokenizer(str(out)).encode([TEXT])[0]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" or name == "NoSuchTokenizer"
    assert settings["model_max_length"] == (60 if finetuned else 64)


@pytest.mark.parametrize("finetuned", [False, True])
@pytest.mark.parametrize("in_map", [False, True])
def test_all_named_special_tokens_are_kept(in_map: bool, finetuned: bool, tmp_path: Path) -> None:
    """Named in either file, as texts or as dictionaries; but not those that the vocabulary lacks."""
    source, out = tmp_path / "source", tmp_path / "out"
    unk = {"content": NAMES["unk_token"], "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    names = {**NAMES, "unk_token": unk, "image_token": "<image>", "other_token": NAMES["sep_token"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    write_tokenizer(source, settings if in_map else {**settings, **names}, names if in_map else {})
    export(finetuned, source, out)
    loaded = AutoTokenizer.from_pretrained(out)
    assert {f"{role}_token": getattr(loaded, f"{role}_token") for role in ROLES} == NAMES
    special = json.loads((out / "special_tokens_map.json").read_text())
    assert special == {**NAMES, "other_token": NAMES["sep_token"]}
