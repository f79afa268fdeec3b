"""The paper's own checkpoints (`sl_model`): small random weights under their names, against an independent forward."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModel, AutoTokenizer

from biphasic.config.model import ModelConfig
from biphasic.export.run import export_initial
from biphasic.finetuning.trial import run_trial
from biphasic.initial_model import build_language_model
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_encoder
from biphasic.model.segments import Segments
from helpers.papers_models import EPS, HEADS, KV_HEADS, LAYERS, THETA, WIDTH, weights_of, write_model
from helpers.tiny import WORDS, write_tokenizer
from helpers.toy_sets import config_of, make_sets


def hidden_of(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return a text's hidden states [tokens, width], by the formulas alone."""
    w, length, size = {name: weight.float() for name, weight in weights.items()}, len(tokens), WIDTH // HEADS

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    angles = torch.arange(length)[:, None] * THETA ** -(torch.arange(0, size, 2) / size)
    turns = torch.polar(torch.ones_like(angles), angles)  # a head's first and second half are real and imaginary parts

    def rotated(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turns[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = w["embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at, y = f"layers.{layer}.", norm(x, f"layers.{layer}.input_layernorm")
        query, key, value = (
            linear(y, w[f"{at}self_attn.{part}_proj.weight"]).view(length, -1, size) for part in ("q", "k", "v")
        )
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (rotated(key), value))
        scores = torch.einsum("qhd,khd->hqk", rotated(query), key) / math.sqrt(size)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(length, -1)
        x = x + linear(mixed, w[f"{at}self_attn.o_proj.weight"])
        y = norm(x, f"{at}post_attention_layernorm")
        gate, up = (linear(y, w[f"{at}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x = x + linear(silu(gate) * up, w[f"{at}mlp.down_proj.weight"])
    return norm(x, "norm")


TEXTS = [[4, 9, 17, 30, 8, 2], [11, 5, 2]]


@pytest.mark.parametrize("with_head", [False, True])
def test_hidden_states_are_those_of_the_formulas(tmp_path: Path, with_head: bool) -> None:
    folder = write_model(tmp_path / "m", torch.randn(WORDS, WIDTH).bfloat16() if with_head else None)
    encoder = load_encoder(str(folder))
    segments = Segments.of([len(text) for text in TEXTS], torch.device("cpu"))
    with torch.no_grad():
        hidden = encoder.hidden(torch.tensor(TEXTS[0] + TEXTS[1]), segments)
    expected = torch.cat([hidden_of(weights_of(), text) for text in TEXTS])
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    # Its tokenizer is Llama 3's, whose beginning-of-text token was not used.
    assert encoder.text_tokenizer.prefix == encoder.text_tokenizer.suffix == ()
    assert encoder.text_tokenizer.max_length == 64


def test_a_missing_head_is_drawn_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = (load_language_model(str(write_model(tmp_path / name))) for name in "ab")
    assert caplog.text.count("its files have no lm_head.weight: new ones are drawn") == 2
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert float(first.lm_head.weight.std()) == pytest.approx(0.02, rel=0.1)
    head = torch.randn(WORDS, WIDTH).bfloat16()
    config = ModelConfig(init_from=str(write_model(tmp_path / "h", head)))
    model = build_language_model(config, 64, 0)
    assert torch.equal(model.lm_head.weight, head.float())


def test_it_is_fine_tuned_scored_and_exported(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    make_sets(tmp_path)
    folder = write_model(tmp_path / "m")
    result = run_trial(config_of("sst2", tmp_path / "tasks", folder, tmp_path, max_duration="30ba")).results[0]
    assert result.test is not None and 0.4 < result.test <= 1.0
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        json.dumps({
            "job": "pretrain", "run_name": "continued", "tokenizer": str(tmp_path / "tokenizer"), "max_duration": "4ba",
            "global_batch_size": 2, "model": {"init_from": str(folder)}, "optimizer": {"lr": 1e-3},
            "data": {"sequence_length": 64, "train": {"local": str(tmp_path / "train")}},
            "evaluation": {"interval": None, "batches": None},
            "objective": {"phases": [{"name": "mlm", "masking_ratio": 0.4}]},
        })
    )  # fmt: skip
    export_initial(str(yaml), tmp_path / "exported")
    network = AutoModel.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        hidden = network(torch.tensor([TEXTS[0]])).last_hidden_state[0]
    torch.testing.assert_close(hidden, hidden_of(weights_of(), TEXTS[0]), rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("w4 w5").input_ids == [8, 9]
