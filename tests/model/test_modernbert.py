"""ModernBERT and its decoder (Ettin's), in both directions, against transformers' own classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import (
    AutoModelForMaskedLM,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderModel,
    ModernBertModel,
)

from biphasic.data.tokenizer import load_tokenizer
from biphasic.model import layers
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_encoder
from biphasic.model.forward import packed_forward
from biphasic.model.language_model import LanguageModel
from biphasic.model.segments import Segments
from helpers.backbones import gradients
from helpers.decoders import saved_decoder
from helpers.exports import export_language_model
from helpers.tiny import WORDS, write_tokenizer

FAMILIES = ("modernbert", "modernbert-decoder")
LENGTHS = (21, 9, 1, 14)
"""Longer than the windows."""
LAYERS = 5
"""Global attention, two local layers, global, local."""


def loaded(family: str, folder: Path, **changes: Any) -> tuple[LanguageModel, Any]:
    """Save a small model, and return it as Biphasic loads it and as transformers does."""
    own = saved_decoder(family, folder, num_hidden_layers=LAYERS, **changes)
    return load_language_model(str(folder)), own


def network(backbone: Any, causal: bool) -> Any:
    """The backbone's weights in transformers' class that attends in this direction.

    A token of the encoder sees the tokens at the window's distance, one of the decoder doesn't.
    """
    config, weights = backbone.config, backbone.state_dict()
    known = (ModernBertDecoderConfig if causal else ModernBertConfig)().to_dict()
    content = {name: value for name, value in config.to_dict().items() if name in known and name != "model_type"}
    is_causal = config.model_type == "modernbert-decoder"
    if is_causal != causal:
        content["local_attention"] += 2 if causal else -2
        joined = dict(weights)
        for name in [name for name in weights if "Wqkv" in name or "q_proj" in name]:
            names = [name.replace("Wqkv", f"{part}_proj").replace("q_proj", f"{part}_proj") for part in "qkv"]
            if causal:
                joined |= zip(names, joined.pop(name).chunk(3), strict=True)
            else:
                joined[name.replace("q_proj", "Wqkv")] = torch.cat([joined.pop(part) for part in names])
        weights = joined
    network_class, config_class = (
        (ModernBertDecoderModel, ModernBertDecoderConfig) if causal else (ModernBertModel, ModernBertConfig)
    )
    own = network_class._from_config(config_class(**content), attn_implementation="eager").eval()
    own.load_state_dict(weights)
    return own


def record_layers(backbone: Any) -> list[Tensor]:
    """Let a network record the outputs of its layers and of its final norm."""
    outputs: list[Tensor] = []
    for module in (*backbone.layers, backbone.final_norm):
        module.register_forward_hook(lambda *given: outputs.append(given[-1][0].detach()))
    return outputs


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_every_layer_are_transformers_own(family: str, causal: bool, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)[0]
    own = network(model.backbone, causal)
    packed, alone = record_layers(model.backbone), record_layers(own)
    tokens = torch.randint(WORDS, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    packed_forward(model.backbone, tokens, Segments.of(LENGTHS, tokens.device), causal)
    expected: list[Tensor] = []
    for text in tokens.split(LENGTHS):
        alone.clear()
        own(input_ids=text[None])
        expected = [torch.cat(parts) for parts in zip(expected, alone, strict=True)] if expected else [*alone]
    assert len(packed) == len(expected) == LAYERS + 1
    for ours, theirs in zip(packed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "causal", "near"),
    [("modernbert", False, (-3, 3)), ("modernbert", True, (0, 3)), ("modernbert-decoder", False, (-2, 2)),
     ("modernbert-decoder", True, (0, 2))],
)  # fmt: skip
def test_local_layers_see_their_window(family: str, causal: bool, near: tuple[int, int], tmp_path: Path) -> None:
    """`local_attention` is 6; a changed token moves those that see it, in its own segment only."""
    model = loaded(family, tmp_path, layer_types=["sliding_attention"] + ["full_attention"] * (LAYERS - 1))[0]
    model.backbone.layers = model.backbone.layers[:1]  # pyright: ignore
    tokens, segments = torch.arange(4, 34), Segments.of((5, 20, 5), torch.device("cpu"))
    before = packed_forward(model.backbone, tokens, segments, causal)
    for at in (6, 15, 24):
        changed = tokens.clone()
        changed[at] = 40
        moved = (packed_forward(model.backbone, changed, segments, causal) - before).abs().amax(1) > 1e-5
        first, last = max(at + near[0], 5), min(at + near[1], 24)
        assert moved.nonzero()[:, 0].tolist() == list(range(first, last + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_are_a_padded_batch_s(family: str, tmp_path: Path) -> None:
    """Each family's own class and head: MLM with labels at some tokens, CLM at all but the last of a text."""
    causal = family == "modernbert-decoder"
    model, own = loaded(family, tmp_path)
    model.train(), own.train()
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(1, WORDS, (sum(LENGTHS),), generator=generator).split(LENGTHS)
    if causal:
        targets = [pad(text[1:], (0, 1), value=-100) for text in texts]
    else:
        targets = [torch.where(torch.rand(len(text), generator=generator) < 0.4, text, -100) for text in texts]
    batch, labels, mask = (
        torch.stack([pad(part, (0, max(LENGTHS) - len(part)), value=value) for part in parts])
        for parts, value in ((texts, 0), (targets, -100), ([torch.ones_like(text) for text in texts], 0))
    )
    logits = own(input_ids=batch, attention_mask=mask).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    total, count = model(torch.cat(texts), torch.cat(targets), Segments.of(LENGTHS, mask.device), causal)
    total.backward()
    assert int(count) == int((labels >= 0).sum())
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    names = {"decoder.": "lm_head.", "model.": "backbone.", "head.": "head.", "lm_head.": "head."}
    ours, seen = {name: weight.grad for name, weight in model.named_parameters()}, set()
    for name, weight in own.named_parameters():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        seen.add(name := name.replace(prefix, names[prefix], 1))
        assert weight.grad.abs().sum() > 0
        if name == "backbone.embeddings.tok_embeddings.weight":
            weight.grad[0] = ours[name][0]  # transformers gives the padding token's no gradient from the input
        torch.testing.assert_close(ours[name], weight.grad, atol=1e-4, rtol=1e-4)
    assert seen == set(ours)
    assert {"lm_head.bias", "head.dense.weight", "head.norm.weight"} <= seen
    assert model.lm_head.weight is model.backbone.get_input_embeddings().weight  # pyright: ignore


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_backends(family: str, backend: str, tmp_path: Path) -> None:
    """Hidden states and gradients in both directions; flex gets a block mask for the windows of the layers."""
    backbone = loaded(family, tmp_path, vocab_size=97)[0].backbone
    layers.recompute_layers(backbone, [1])
    for result, reference in zip(gradients(backbone, backend), gradients(backbone, "mask"), strict=True):
        assert (result - reference).norm() < 1e-5 * reference.norm()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_is_modernbert_s_own_class(family: str, tmp_path: Path) -> None:
    """It loads without remote code, with the logits that training has; the decoder's weights as the encoder's."""
    model = loaded(family, tmp_path / "model")[0]
    model.resize_token_embeddings(WORDS + 1)
    write_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "out"
    export_language_model(model, load_tokenizer(str(tmp_path / "tokenizer")), out)
    assert not list(out.glob("*.py"))
    theirs, info = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs).__name__ == "ModernBertForMaskedLM"
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.randint(WORDS, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    segments = Segments.of(LENGTHS, tokens.device)
    hidden = packed_forward(model.backbone, tokens, segments, causal=False)
    assert model.head is not None
    expected = model.lm_head(model.head(hidden))
    for text, logits in zip(tokens.split(LENGTHS), expected.split(LENGTHS), strict=True):
        torch.testing.assert_close(theirs.eval()(input_ids=text[None]).logits[0], logits, atol=1e-5, rtol=1e-5)
    # Biphasic goes on from it, and uses it as an encoder.
    again = load_language_model(str(out))
    torch.testing.assert_close(packed_forward(again.backbone, tokens, segments, causal=False), hidden)
    torch.testing.assert_close(load_encoder(str(out)).hidden(tokens, segments), hidden, atol=1e-5, rtol=1e-5)
