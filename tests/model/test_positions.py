"""A segment's hidden states depend on no other segment of its microbatch, whatever a configuration names for positions."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from biphasic.config.model import ModelConfig
from biphasic.config.plan import plan
from biphasic.errors import UserError
from biphasic.initial_model import build_language_model
from biphasic.model import attention
from biphasic.model import backbone as backbone_module
from biphasic.model.architecture import rows_problem
from biphasic.model.encoder import load_encoder
from biphasic.model.language_model import LanguageModel
from biphasic.model.segments import Segments
from biphasic.objectives.targets import clm_targets
from conftest import Write
from helpers.decoders import saved_decoder
from helpers.tiny import LENGTH, WORDS, config_of, train, write_rows, write_tokenizer

THRESHOLD = LENGTH
LENGTHS = ((3, 29), (32,), (31, 1), (10, 12, 10))
"""Segments of four rows of `THRESHOLD` tokens. Twice as long, those of the last row alone stay below it."""


def scaled(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **keys}}


ORIGINAL = "original_max_position_embeddings"
LONGROPE = {**scaled("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4), ORIGINAL: THRESHOLD}
DYNAMIC = {**scaled("dynamic", factor=4.0), "max_position_embeddings": THRESHOLD}
BY_LAYER = {
    "rope_parameters": {
        "sliding_attention": scaled("default")["rope_parameters"],
        "full_attention": scaled("dynamic", factor=4.0)["rope_parameters"],
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": THRESHOLD,
}
DEPENDENT: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", LONGROPE),
    "dynamic": ("llama", DYNAMIC),
    "dynamic in some layers": ("gemma3_text", BY_LAYER),
}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "gemma2": ("gemma2", {"sliding_window": 6}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "modernbert": ("modernbert", {"local_attention": 12, "num_hidden_layers": 3}),
}
INDEPENDENT: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", scaled("linear", factor=4.0)),
    "yarn": ("llama", scaled("yarn", factor=4.0, **{ORIGINAL: THRESHOLD})),
    "llama3": ("llama", scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **{ORIGINAL: 8})),
    "scores scaled by position": ("ministral3", scaled("yarn", factor=4.0, llama_4_scaling_beta=0.5, **{ORIGINAL: 8})),
    **WINDOWS,
}


def saved(name: str, folder: Path, **changes: Any) -> str:
    """Save one of the models; its folder."""
    family, keys = {**DEPENDENT, **INDEPENDENT}[name]
    saved_decoder(family, folder, **{"max_position_embeddings": 4 * THRESHOLD, **keys, **changes})
    return str(folder)


def loss(model: LanguageModel, rows: Tensor, microbatch: int, causal: bool) -> float:
    """The loss of a batch, computed by microbatch."""
    total = 0.0
    for first in range(0, len(rows), microbatch):
        part = rows[first : first + microbatch]
        cuts = [length * rows.shape[1] // THRESHOLD for lengths in LENGTHS[first : first + microbatch] for length in lengths]
        targets = clm_targets(part, torch.ones_like(part)).flatten() if causal else part.flatten()
        total += float(model(part.flatten(), targets, Segments.of(cuts, part.device), causal)[0].detach())
    return total / rows.numel()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*DEPENDENT, *INDEPENDENT])
def test_the_loss_depends_on_no_microbatch(name: str, causal: bool, tmp_path: Path) -> None:
    """In rows up to the threshold for those positions that would, and in twice as long ones for all others."""
    length = THRESHOLD if name in DEPENDENT else 2 * THRESHOLD
    model = build_language_model(ModelConfig(init_from=saved(name, tmp_path)), length, seed=0).eval()
    rows = torch.randint(WORDS, (4, length), generator=torch.Generator().manual_seed(1))
    values = [loss(model, rows, microbatch, causal) for microbatch in (4, 1, 2)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("name", DEPENDENT)
def test_longer_rows_are_refused_by_the_plan_and_by_the_run(name: str, write_yaml: Write, tmp_path: Path) -> None:
    """Also if only a later phase has them, and whether config.json is transformers 5's or has the older keys."""
    path = Path(saved(name, tmp_path / "model"))
    write_rows(tmp_path / "long", 60, seed=3, length=2 * THRESHOLD)
    longer = {"train": {"local": str(tmp_path / "long")}, "sequence_length": 2 * THRESHOLD}
    keys: dict[str, Any] = {"model": {"init_from": str(path)}}
    assert plan(config_of(write_yaml("short", **keys)), 1).problems == []
    config = config_of(
        write_yaml("long", **keys, objective__phases=[{"name": "clm", "until": "6ba"}, {"name": "mlm", "data": longer}])
    )
    content = json.loads((path / "config.json").read_text())
    older = dict(content)
    if name != "dynamic in some layers":
        scaling: dict[str, Any] = older.pop("rope_parameters")
        older |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        scaling.pop("partial_rotary_factor", None)
        scaling["type"] = scaling.pop("rope_type")
    formats = [content, older]
    if name == "longrope":  # as older files of Phi-3 have it
        formats.append({**older, "rope_scaling": {**older["rope_scaling"], "type": "yarn"}})
    for each in formats:
        (path / "config.json").write_text(json.dumps(each))
        with pytest.raises(UserError) as caught:
            train(config)
        [problem] = plan(config, 1).problems
        assert str(caught.value) == problem and "\n" not in problem
        key = ORIGINAL if name == "longrope" else "max_position_embeddings"
        about = f"{path} has rotary positions of type {name.split()[0]}: in rows longer than its {key} (32)"
        advice = "Set data.sequence_length (also of phases; the longest is 64) to at most 32 and leave "
        assert f"model.init_from: {about}" in problem and advice in problem


def test_plans_know_of_other_rows_that_are_too_long(write_yaml: Write, tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path / "model", max_position_embeddings=16)
    config = config_of(write_yaml(model={"init_from": str(tmp_path / "model")}))
    assert plan(config, 1).problems[0].startswith("data.sequence_length is 32, but ")
    longer = {"init_from": str(tmp_path / "model"), "max_position_embeddings": 32}
    assert plan(config_of(write_yaml(model=longer)), 1).problems == []
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": "many", "rope_scaling": [1]}')
    assert plan(config, 1).problems == []  # loading it will say what is wrong


def test_learned_positions_allow_no_longer_rows(write_yaml: Write, tmp_path: Path) -> None:
    """Nor another maximum, whose table the model's files don't have."""
    path = tmp_path / "model"
    saved_decoder("biogpt", path, max_position_embeddings=LENGTH)
    assert plan(config_of(write_yaml("fits", model={"init_from": str(path)})), 1).problems == []
    build_language_model(ModelConfig(init_from=str(path)), LENGTH, seed=0)
    longer = {"sequence_length": 2 * LENGTH, "train": {"local": str(tmp_path / "long")}}
    phases = {"objective__phases": [{"name": "clm", "until": "6ba"}, {"name": "mlm", "data": longer}]}
    changes: list[tuple[int | None, int, dict[str, Any]]] = [(None, 2 * LENGTH, phases), (2 * LENGTH, LENGTH, {})]
    for maximum, rows, keys in changes:
        model = {"init_from": str(path), "max_position_embeddings": maximum}
        [problem] = plan(config_of(write_yaml(f"rows-{rows}", model=model, **keys)), 1).problems
        assert problem.startswith(f"model.init_from: {path} has {LENGTH} learned positions, none for longer rows: set ")
        with pytest.raises(UserError) as caught:
            build_language_model(ModelConfig(init_from=str(path), max_position_embeddings=maximum), rows, seed=0)
        assert str(caught.value).partition("phases")[0] == problem.partition("phases")[0]


def test_a_rotary_model_whose_config_names_no_base_may_be_lengthened() -> None:
    """As LLaMA's first. GPT-NeoX's older name for the base is `rotary_emb_base`."""
    for key in ("rms_norm_eps", "rotary_emb_base"):
        assert rows_problem("x", {"max_position_embeddings": 32, key: 1}, 64, 64) is None


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_the_maximum_that_frequencies_are_computed_from_stays(name: str, tmp_path: Path) -> None:
    """Another one would change LongRoPE's scale and dynamic NTK's threshold."""
    path = saved(name, tmp_path)
    with pytest.raises(UserError, match=f"of type {name}: .*leave model.max_position_embeddings out"):
        build_language_model(ModelConfig(init_from=path, max_position_embeddings=64), THRESHOLD, seed=0)


@pytest.mark.parametrize("name", DEPENDENT)
def test_the_probe_finds_positions_that_depend_on_the_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of types that aren't known, too: nothing but the length of rows is."""
    monkeypatch.setattr(backbone_module, "rows_problem", lambda *_: None)
    path = saved(name, tmp_path)
    assert build_language_model(ModelConfig(init_from=path), THRESHOLD, seed=0)
    with pytest.raises(UserError, match="its positions depend on the longest segment of a call"):
        build_language_model(ModelConfig(init_from=path), THRESHOLD + 1, seed=0)


@pytest.mark.parametrize("name", WINDOWS)
def test_the_probe_sees_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are longer than the segments in which it changes tokens."""
    path, compute = saved(name, tmp_path), attention.BACKEND_FUNCTIONS["sdpa"]
    wider: dict[str, int] = {"by": 0}

    def wrong(query: Any, key: Any, value: Any, segments: Segments, options: attention.AttentionOptions) -> Any:
        options = options._replace(window=options.window + wider["by"] if options.window else 0)
        return compute(query, key, value, segments, options)

    monkeypatch.setitem(attention.BACKEND_FUNCTIONS, "sdpa", wrong)
    assert build_language_model(ModelConfig(init_from=path), 2 * THRESHOLD, seed=0)
    for wider["by"] in (-1, 1):
        with pytest.raises(UserError, match="its hidden states are not those of its own attention"):
            build_language_model(ModelConfig(init_from=path), 2 * THRESHOLD, seed=0)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_an_encoder_s_texts_are_truncated_at_the_threshold(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch with a long text would change the embeddings of the others."""
    path = saved(name, tmp_path)
    write_tokenizer(tmp_path)
    # As sentence-transformers stores a length of the user's.
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    with caplog.at_level(logging.WARNING):
        encoder = load_encoder(path)
    assert "texts are truncated to its " in caplog.text and f"max_position_embeddings ({THRESHOLD})" in caplog.text
    encoder.backbone.eval()
    texts = encoder.tokenize(["w1 w2 w3", "w4 " * 80, "w5 w6"])
    assert [len(text) for text in texts] == [3, THRESHOLD, 2]
    alone = torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(encoder.embed(texts), alone, atol=1e-6, rtol=1e-5)
