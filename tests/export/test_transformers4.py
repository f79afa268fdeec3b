"""Exports in transformers 4.57.6: the same hidden states, logits and tokens as in training, or an error.

It reads the rotary positions and the kinds of layers under other keys than transformers 5 and, where a key is missing, takes
its default without a message. docs/export.md has the table of what was loaded.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModel, AutoTokenizer, ModernBertConfig, PreTrainedTokenizerFast

from biphasic.data.tokenizer import load_tokenizer
from biphasic.export import formats
from biphasic.export.finetuned import export_finetuned
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.hf_config import load_hf_config
from biphasic.model.language_model import from_hf_config
from biphasic.model.segments import Segments
from helpers import families, transformers4
from helpers.backbones import OTHER_SIZES, SMALL
from helpers.decoders import FAMILIES, packed
from helpers.exports import export_language_model

TOLERANCE = 1e-5
SENTENCE = "Copper bridges, 12 years old; it's <|im_start|> quiet."
WORDS = 300
FULL, LOCAL = "full_attention", "sliding_attention"
KINDS = {"layer_types": [LOCAL, FULL, LOCAL, FULL, LOCAL], "sliding_window": 3}


def theta(value: float = 30_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": value, **more}


LINEAR = theta(rope_type="linear", factor=2.0)
YARN = theta(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = theta(
    500_000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
BOTH: dict[Any, dict[str, Any]] = {FULL: theta(90_000.0), LOCAL: theta(20_000.0)}
"""Other bases than the defaults of the families that have two."""
PLAIN = {family: {**FAMILIES.get(family, {}), "rope_parameters": theta()} for family in formats.LOADED_BY_4}
PLAIN["ministral"] |= {"sliding_window": 3}
PLAIN["olmo3"] |= {"sliding_window": 3}
PLAIN["cohere2"] |= KINDS
PLAIN["gemma3_text"] |= {**KINDS, "rope_parameters": BOTH}
PLAIN["phi"]["rope_parameters"] = theta(partial_rotary_factor=0.5)
PLAIN["phi3"] |= {"sliding_window": 3}
PLAIN["llama"] |= {"attention_bias": True, "mlp_bias": True}
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, changes) for family, changes in PLAIN.items()},
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama3-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2-linear": ("qwen2", {"rope_parameters": LINEAR}),
    "gemma3-linear": ("gemma3_text", {**KINDS, "rope_parameters": {**BOTH, FULL: LINEAR}}),
    "modernbert": ("modernbert", {"global_attn_every_n_layers": 2, "rope_parameters": BOTH}),
    "modernbert-global": ("modernbert", {"global_attn_every_n_layers": 1}),
    "modernbert-once": ("modernbert", {"global_attn_every_n_layers": 7, "rope_parameters": BOTH}),
    "modernbert-decoder": ("modernbert-decoder", {"global_attn_every_n_layers": 2, "rope_parameters": BOTH}),
}
"""Names, families and settings of the exports with equal results."""
NEEDS_5 = "encoder needs transformers 5.0 or later, not 4.57.6"
NO_PERIOD = "unsupported operand type.*'dict'"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "native": ("llama", {"rope_parameters": theta()}, "model type `eurobert` but Transformers does not recognize"),
    # Its experts' weights have other names there.
    "mixtral": ("mixtral", {"num_local_experts": 4}, f"this mixtral {NEEDS_5}"),
    "llama-dynamic": ("llama", {"rope_parameters": theta(rope_type="dynamic", factor=2.0)}, NEEDS_5),
    "gemma3-local": ("gemma3_text", {**KINDS, "rope_parameters": {**BOTH, LOCAL: LINEAR}}, NEEDS_5),
    "olmo3-bases": ("olmo3", {"sliding_window": 3, "rope_parameters": BOTH}, NEEDS_5),
    "olmo2-linear": ("olmo2", {"rope_parameters": LINEAR}, "`rope_scaling`'s type field must be one of"),
    "modernbert-irregular": ("modernbert", {"layer_types": KINDS["layer_types"]}, NO_PERIOD),
    "modernbert-scaled": ("modernbert", {"rope_parameters": {FULL: LINEAR, LOCAL: LINEAR}}, NO_PERIOD),
}
"""Names, families, settings and errors of the others."""
FINETUNED = ("finetuned-modernbert", "finetuned-bert")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Longer than the windows, and long enough that another base shows."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 65, (length,), generator=generator).tolist() for length in (50, 17, 3)]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer as transformers 5 saves it: of a class, and with a list, that 4 doesn't read."""
    special = ["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>", "<|im_start|>"]
    tokens = Tokens(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokens.train_from_iterator([SENTENCE] * 9, trainer)
    names = dict(zip(["pad_token", "bos_token", "eos_token", "mask_token"], special, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokens, **names, extra_special_tokens=special[4:]).save_pretrained(folder)


def export_finetuned_encoder(name: str, folder: Path, out: Path, texts: list[list[int]]) -> torch.Tensor:
    """Export an encoder in its own family's class with the tokenizer of transformers 5; return its hidden states."""
    if name == "finetuned-bert":
        families.bert(folder)
    else:
        config = ModernBertConfig(
            vocab_size=65, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=64, local_attention=6, layer_types=[FULL, LOCAL, FULL, LOCAL, FULL],
            rope_parameters=BOTH,
            initializer_range=0.2, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
        )  # fmt: skip
        AutoModel.from_config(config).save_pretrained(folder)
        families.bert_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"
    file.write_text(json.dumps({**settings, "extra_special_tokens": ["w7"]}))
    encoder = load_encoder(str(folder))
    assert encoder.is_own_family
    export_finetuned(encoder, TextHead(32, 2), ["a", "b"], out, lambda **_: "card", prompts={}, max_length=60)
    segments = Segments.of([len(text) for text in texts], torch.device("cpu"))
    with torch.no_grad():
        return encoder.hidden(torch.tensor([token for text in texts for token in text]), segments)


@pytest.fixture(scope="module")
def exports(
    texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str, list[torch.Tensor]]]:
    """Folders by name, and the hidden states and logits of training."""
    work = tmp_path_factory.mktemp("exports")
    write_tokenizer(work / "bytes")
    families.bert_tokenizer(work / "words")
    tokenizers = {False: load_tokenizer(str(work / "bytes")), True: load_tokenizer(str(work / "words"))}
    folders, expected = dict[str, Path](), dict[str, list[torch.Tensor]]()
    for name, (family, changes, *_) in {**EQUAL, **REFUSED}.items():
        sizes = {**SMALL, "vocab_size": WORDS, "num_hidden_layers": 5, **OTHER_SIZES.get(family, {}), **changes}
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
        model = from_hf_config(AutoConfig.for_model(family, **{**sizes, **special}), seed=1).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        folders[name] = work / f"out-{name}"
        export_language_model(model, tokenizers[family.startswith("modernbert")], folders[name])
        with torch.no_grad():
            hidden = packed(model.backbone, texts)
            expected[name] = [hidden, model.logits(hidden)]
    for name in FINETUNED:
        folders[name] = work / f"out-{name}"
        expected[name] = [export_finetuned_encoder(name, work / name, folders[name], texts)]
    return folders, expected


@pytest.fixture(scope="module")
def in_4(
    exports: tuple[dict[str, Path], Any], texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one process of transformers 4 makes of all folders."""
    return transformers4.load_all(exports[0], texts, SENTENCE, tmp_path_factory.mktemp("transformers4"))


@pytest.mark.parametrize("name", [*EQUAL, *FINETUNED])
def test_equal_hidden_states_logits_and_tokens(name: str, exports: Any, in_4: dict[str, Any]) -> None:
    (folders, expected), loaded = exports, in_4[name]
    assert isinstance(loaded, dict), loaded
    for outputs, right in zip(loaded["outputs"], expected[name], strict=True):
        assert len(outputs) >= 2
        assert max(float((output - right).abs().max()) for output in outputs) <= TOLERANCE
    assert expected[name][0].abs().max() > 0.3
    tokenizer = AutoTokenizer.from_pretrained(folders[name], trust_remote_code=False)
    assert loaded["encoding"] == dict(tokenizer(SENTENCE))


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_transformers_4_cannot_compute_is_an_error_in_it(name: str, in_4: dict[str, Any]) -> None:
    assert isinstance(in_4[name], str)
    assert re.search(REFUSED[name][2], in_4[name]), in_4[name]


def test_transformers_5_and_biphasic_read_the_same_configuration(exports: Any) -> None:
    """The older keys change nothing there, and leave nothing in a configuration that is exported again."""
    for name, folder in exports[0].items():
        content = json.loads((folder / "config.json").read_text())
        older = {"rope_theta", "rope_scaling", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"}
        assert older & set(content) or name == "finetuned-bert"
        loaded = load_hf_config(str(folder))
        if name != "finetuned-bert":
            assert loaded.rope_parameters == content["rope_parameters"], name
            assert not older & set(loaded.to_dict()), name


def test_the_keys_of_text_embeddings_inference(exports: Any) -> None:
    """It reads ModernBERT's older keys alone."""
    for name in ("modernbert", "modernbert-decoder", "finetuned-modernbert"):
        content = json.loads((exports[0][name] / "config.json").read_text())
        keys = [content[key] for key in ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")]
        assert keys == [90_000.0, 20_000.0, 2]
