"""Exported folders in transformers' own classes and sentence-transformers, against training's packed attention."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export import write
from biphasic.export.finetuned import export_finetuned, require_exportable
from biphasic.model.architecture import PRESETS, Architecture
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.language_model import LanguageModel, from_hf_config, llama_config
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import TextTokenizer
from helpers.decoders import FAMILIES, TEXTS, decoder, packed, padded
from helpers.exports import export_encoder, export_language_model
from helpers.tiny import LENGTH, MASK, WORDS

FAST = ("210m", "tied", "mistral", "gemma2")
"""The formats, head layouts, windows and softcaps; the other names are slow."""
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in (*PRESETS, "tied", *FAMILIES)]
HIDDEN, LOGITS = 1e-5, 1e-4
"""Tolerances for EuroBERT's format."""
OTHERS = 1e-4
"""Tolerance for other families."""
SEGMENTS = Segments.of([len(text) for text in TEXTS], torch.device("cpu"))


def scaled_down(name: str) -> LanguageModel:
    """A preset's shape with an eighth of its widths, and the same heads and groups."""
    full = PRESETS["610m" if name == "tied" else name]
    size = Architecture(
        WORDS, hidden=full.hidden // 8, ffn=full.ffn // 8, layers=3, heads=full.heads, kv_heads=full.kv_heads,
        head_dim=full.head_dim // 8, tied=name == "tied",
    )  # fmt: skip
    # Large enough that a wrong path shows, small enough that scores don't amplify rounding.
    config = llama_config(size, LENGTH, rope_theta=500.0, initializer_range=size.hidden**-0.5)
    return from_hf_config(config, seed=1)


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> LanguageModel:
    return decoder(name) if name in FAMILIES else scaled_down(name)


def options(name: str) -> dict[str, Any]:
    """EuroBERT's format loads without code."""
    return {"trust_remote_code": True} if name in FAMILIES else {}


@torch.no_grad()
def compare(auto: Any, folder: Path, name: str, expected: Tensor, tolerance: float) -> None:
    """The largest difference, padded on either side and text by text, in each attention that the format takes.

    `expected`: [tokens, ...] of all texts, or [texts, labels] for a classifier of texts.
    """
    per_text = auto is AutoModelForSequenceClassification
    # PyTorch's attention has no softcap; such a folder chooses eager by default.
    for implementation in ("eager", None if name == "gemma2" else "sdpa"):
        loaded = auto.from_pretrained(folder, attn_implementation=implementation, **options(name)).eval()
        module = "transformers_modules." if name in FAMILIES else "transformers.models.eurobert."
        assert type(loaded).__module__.startswith(module)
        for left in (False, True):
            tokens, mask = padded(left)
            output = loaded(input_ids=tokens, attention_mask=mask)[0]
            computed = output if per_text else output[mask.bool()]
            assert (computed - expected).abs().max() <= tolerance, (implementation, left)
        alone = torch.cat([loaded(input_ids=torch.tensor([text]))[0].flatten(0, -2) for text in TEXTS])
        assert (alone - expected).abs().max() <= tolerance, (implementation, "alone")


def test_hidden_states_and_logits(name: str, model: LanguageModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / f"language-{name}"
    export_language_model(model, tokenizer, out)
    hidden = packed(model.backbone)
    assert hidden.abs().max() > 0.1
    compare(AutoModel, out, name, hidden, OTHERS if name in FAMILIES else HIDDEN)
    compare(AutoModelForMaskedLM, out, name, model.logits(hidden).detach(), LOGITS)
    if name not in FAMILIES:
        config = json.loads((out / "config.json").read_text())
        assert (config["model_type"], config["architectures"]) == ("eurobert", ["EuroBertForMaskedLM"])
        assert (config["mask_token_id"], config["rope_parameters"]["rope_theta"]) == (MASK, 500.0)
        assert "auto_map" not in config
    # The first token depends on the last; with windows, layer by layer.
    encoder = AutoModel.from_pretrained(out, **options(name)).eval()
    text = torch.tensor([TEXTS[0]])
    changed_text = text.clone()
    changed_text[0, -1] = 20
    with torch.no_grad():
        first, changed = (encoder(x).last_hidden_state[0, 0] for x in (text, changed_text))
    assert (first - changed).abs().max() > 1e-4
    # A classifier starts from the same folder.
    tokens, mask = padded()
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        classifier = auto.from_pretrained(out, num_labels=3, **options(name))
        assert classifier(input_ids=tokens, attention_mask=mask).logits.shape[-1] == 3


def test_sentence_transformers(name: str, model: LanguageModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / f"sentences-{name}"
    export_encoder(model.backbone, tokenizer, out, "card", prompts={"query": "w1 "}, max_length=9)
    compare(AutoModel, out, name, packed(model.backbone), OTHERS if name in FAMILIES else HIDDEN)
    encoder = SentenceTransformer(str(out), device="cpu", **options(name))
    assert (encoder.prompts["query"], encoder.max_seq_length) == ("w1 ", 9)
    texts = ["w5 w6 w7 w8 w9 w10", "w9", "w3 w4"]
    ids = tokenizer.encode(texts)
    expected = mean_pool(packed(model.backbone, ids), Segments.of([len(i) for i in ids], torch.device("cpu")))
    embeddings = encoder.encode(texts, convert_to_tensor=True)
    assert (embeddings - expected).abs().max() <= (OTHERS if name in FAMILIES else HIDDEN)
    loaded = load_encoder(str(out))
    assert (loaded.text_tokenizer.settings.prompts["query"], loaded.text_tokenizer.max_length) == ("w1 ", 9)
    torch.testing.assert_close(loaded.embed(ids), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [TextHead, TokenHead])
def test_fine_tuned_heads(kind: Any, name: str, model: LanguageModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder = Encoder(model.backbone, TextTokenizer(tokenizer, LENGTH))
    require_exportable(encoder)
    hidden = packed(model.backbone)
    torch.manual_seed(0)
    head = kind(hidden.shape[1], 3)
    out = tmp_path / f"{kind.__name__}-{name}"
    export_finetuned(encoder, head, ["a", "b", "c"], out, lambda **_: "card", prompts={}, max_length=LENGTH)
    with torch.no_grad():
        logits = head(mean_pool(hidden, SEGMENTS) if kind is TextHead else hidden)
    auto: Any = AutoModelForSequenceClassification if kind is TextHead else AutoModelForTokenClassification
    compare(auto, out, name, logits, LOGITS)
    tokens, mask = padded()
    labels = torch.tensor([0, 2, 1]) if kind is TextHead else torch.where(mask.bool(), tokens % 3, -100)
    loaded = auto.from_pretrained(out, **options(name)).eval()
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    with torch.no_grad():
        loss = loaded(input_ids=tokens, attention_mask=mask, labels=labels).loss
    kept = labels if kind is TextHead else labels[mask.bool()]
    torch.testing.assert_close(loss, cross_entropy(logits, kept), atol=1e-4, rtol=1e-4)
    # Biphasic loads the encoder again.
    torch.testing.assert_close(packed(load_encoder(str(out)).backbone), hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["610m", "qwen3"], indirect=True)
def test_shards(
    name: str, model: LanguageModel, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 100_000 if name == "610m" else 30_000)
    out = tmp_path / f"shards-{name}"
    export_language_model(model, tokenizer, out)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    hidden = packed(model.backbone)
    compare(AutoModel, out, name, hidden, OTHERS if name in FAMILIES else HIDDEN)
    compare(AutoModelForMaskedLM, out, name, model.logits(hidden).detach(), LOGITS)
