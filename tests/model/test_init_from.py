"""Training can start from any supported decoder: same loss as its own code, room for a mask token, errors of one line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from biphasic.config.model import ModelConfig
from biphasic.config.plan import plan
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.initial_model import build_language_model
from biphasic.model import attention
from biphasic.model import language_model as language_model_module
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_encoder
from biphasic.model.probe import packed_attention, packing_problem
from biphasic.model.segments import Segments
from biphasic.objectives.targets import clm_targets
from conftest import Write
from helpers.backbones import TESTED_FAMILIES, backbone
from helpers.decoders import saved_decoder
from helpers.exports import export_language_model
from helpers.tiny import WORDS, config_of, keep_checkpoints_up_to, losses, train, write_tokenizer

DECODERS = [family for family in TESTED_FAMILIES if family not in ("eurobert", "modernbert")]


@pytest.mark.parametrize("family", DECODERS)
def test_clm_loss_equals_the_family_s_own(family: str, tmp_path: Path) -> None:
    original = saved_decoder(family, tmp_path)
    model = load_language_model(str(tmp_path))
    tokens = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = original(input_ids=tokens, labels=tokens).loss
    targets = clm_targets(tokens, torch.ones_like(tokens))
    total, count = model(tokens.flatten(), targets.flatten(), Segments.of([17] * 3, tokens.device), causal=True)
    assert abs(float(total / count) - float(expected)) < 1e-5
    if family == "phi":  # its MLP has no gate
        return
    assert model.architecture().parameters <= sum(p.numel() for p in model.parameters()) + 2 * 2 * 32


def test_logits_that_a_family_computes_in_its_own_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Cohere's and Granite's were, which trained without their scale, before it was known."""
    saved_decoder("qwen3", tmp_path)
    assert load_language_model(str(tmp_path)).logit_scale == 1
    own = Qwen3ForCausalLM.forward

    def scaled(self: Any, *arguments: Any, **options: Any) -> Any:
        output = own(self, *arguments, **options)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", scaled)
    with pytest.raises(UserError, match="qwen3 isn't supported: its logits aren't those of its head"):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_widening_keeps_weights_and_tying(family: str, tmp_path: Path) -> None:
    """Llama's head is untied, Gemma's is tied, Phi's has a bias."""
    saved_decoder(family, tmp_path)
    before, after = load_language_model(str(tmp_path)), load_language_model(str(tmp_path))
    after.resize_token_embeddings(WORDS + 3)
    names = ["backbone.embed_tokens.weight", "lm_head.weight", *(["lm_head.bias"] if family == "phi" else [])]
    for name in names:
        old, new = before.state_dict()[name], after.state_dict()[name]
        assert new.shape[0] == WORDS + 3
        assert torch.equal(new[:WORDS], old)
        torch.testing.assert_close(new[WORDS], old.mean(0))
    tied = [model.lm_head.weight is model.backbone.get_input_embeddings().weight for model in (before, after)]
    assert tied == [family == "gemma2"] * 2


def test_a_decoder_without_a_mask_token_becomes_an_encoder(write_yaml: Write, tmp_path: Path) -> None:
    saved_decoder("qwen3", tmp_path / "qwen3")
    path = write_yaml(model={"init_from": str(tmp_path / "qwen3")}, objective__phases=[{"name": "mlm"}], optimizer__lr=1e-2)
    local = tmp_path / "data" / "tokenizer"
    old = PreTrainedTokenizerFast.from_pretrained(local)
    vocabulary = old.backend_tokenizer
    for file in local.iterdir():
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<|eos|>").save_pretrained(local)
    # Remove the mask token's name from the vocabulary, as in a decoder's tokenizer.
    text = (local / "tokenizer.json").read_text().replace("<|mask|>", "w_unused")
    (local / "tokenizer.json").write_text(text)
    tokenizer = load_tokenizer(str(local))
    assert tokenizer.mask_id == WORDS
    values = losses(train(config_of(path)))
    assert values[-1] < values[0]
    trained = load_language_model(str(tmp_path / "runs" / "run" / "checkpoints" / "ba12-rank0.pt"))
    assert trained.config.model_type == "qwen3"
    assert trained.lm_head.weight.shape[0] == WORDS + 1


def test_another_rope_theta_and_longer_rows(tmp_path: Path) -> None:
    """The loss on long rows is that of the family's own code with the same configuration."""
    saved_decoder("llama", tmp_path, max_position_embeddings=16)
    config = ModelConfig(init_from=str(tmp_path), rope_theta=500.0, max_position_embeddings=48)
    model = build_language_model(config, sequence_length=48, seed=0)
    assert model.config.max_position_embeddings == 48
    tokens = torch.randint(WORDS, (2, 48), generator=torch.Generator().manual_seed(1))
    targets = clm_targets(tokens, torch.ones_like(tokens))
    total, count = model(tokens.flatten(), targets.flatten(), Segments.of([48] * 2, tokens.device), causal=True)
    losses_of = {}
    for theta in (500.0, 10_000.0):
        rope = {"rope_type": "default", "rope_theta": theta}
        own = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=rope, attn_implementation="eager")
        losses_of[theta] = float(own(input_ids=tokens, labels=tokens).loss)
    assert abs(float(total / count) - losses_of[500.0]) < 1e-5
    assert abs(losses_of[10_000.0] - losses_of[500.0]) > 1e-3


def test_a_checkpoint_with_another_rope_theta(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml(max_duration="2ba", objective__phases=[{"name": "clm"}], schedule={})
    folder = train(config_of(path))
    path = str(folder / "checkpoints" / "ba2-rank0.pt")
    config = ModelConfig(init_from=path, rope_theta=777.0, max_position_embeddings=128)
    model, before = build_language_model(config, 128, seed=0), load_language_model(path)
    assert (model.config.rope_parameters["rope_theta"], model.config.max_position_embeddings) == (777.0, 128)
    assert (before.config.rope_parameters["rope_theta"], before.config.max_position_embeddings) == (10_000.0, 32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize(
    ("family", "keys", "problem"),
    [
        ("llama", {}, "data.sequence_length is 48, but .* is for sequences of up to 16 tokens: set model.max_position"),
        ("gemma3_text", {"rope_theta": 500.0}, "model.rope_theta: .* has no plain rotary positions with one base"),
    ],
)
def test_positions_that_don_t_fit_are_refused(family: str, keys: dict[str, Any], problem: str, tmp_path: Path) -> None:
    saved_decoder(family, tmp_path, max_position_embeddings=16)
    with pytest.raises(UserError, match=problem):
        build_language_model(ModelConfig(init_from=str(tmp_path), **keys), sequence_length=48, seed=0)


def test_unusable_folders_are_errors_of_one_line(tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"cut off")
    (tmp_path / "empty").mkdir()
    for name in ("llama", "empty", "missing"):
        with pytest.raises(UserError, match=f"{name}: can't be loaded") as caught:
            load_language_model(str(tmp_path / name))
        assert "\n" not in str(caught.value)


def change(folder: Path, weights: dict[str, torch.Tensor | None], **config: Any) -> None:
    """Replace weights (None: remove) and values in config.json of a saved model."""
    stored = load_file(folder / "model.safetensors") | weights
    kept = {name: weight for name, weight in stored.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, **config)


def change_config(folder: Path, **config: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))


HEADS = {"llama": "lm_head.weight", "gemma2": "lm_head.weight", "modernbert": "decoder.weight"}
HEADS["modernbert-decoder"] = "decoder.weight"


@pytest.mark.parametrize("family", list(HEADS))
def test_a_head_of_its_own_wins_over_a_tied_configuration(
    family: str, tmp_path: Path, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is trained and exported untied."""
    saved_decoder(family, tmp_path / "model")
    own = torch.randn(WORDS, 32, generator=torch.Generator().manual_seed(1))
    change(tmp_path / "model", {HEADS[family]: own}, tie_word_embeddings=True)
    model = load_language_model(str(tmp_path / "model"))
    assert "tie_word_embeddings is true in its config.json, but its files hold another head: used" in caplog.text
    export_language_model(model, load_tokenizer(str(dataset / "tokenizer")), tmp_path / "out")
    for loaded in (model, load_language_model(str(tmp_path / "out"))):
        assert torch.equal(loaded.lm_head.weight, own)
        assert not torch.equal(loaded.backbone.get_input_embeddings().weight, own)  # pyright: ignore[reportCallIssue]
        assert loaded.config.tie_word_embeddings is False


def test_a_stored_copy_of_the_embedding_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_decoder("llama", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, {"lm_head.weight": embedding.clone()}, tie_word_embeddings=True)
    model = load_language_model(str(tmp_path))
    assert model.lm_head.weight is model.backbone.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
    assert not caplog.text


BIASED = {"attention_bias": True, "mlp_bias": True}
ABSENT = "its config.json doesn't have, e.g."


@pytest.mark.parametrize(
    ("saved", "weights", "config", "problem"),
    [
        ({}, {"lm_head.weight": None}, {}, "lack 1 .*lm_head.weight, that .* set tie_word_embeddings: true there"),
        ({}, {"lm_head.weight": None, "model.norm.weight": None}, {}, "lack 2 weights, e.g. lm_head.weight, that .* needs$"),
        (BIASED, {}, dict.fromkeys(BIASED, False), f"14 weights that {ABSENT} model.layers.0.mlp.down_proj.bias"),
        ({}, {"lm_head.bias": torch.ones(WORDS)}, {}, f"{ABSENT} lm_head.bias"),
        ({}, {}, {"num_hidden_layers": 1}, f"9 weights that {ABSENT} model.layers.1.* correct num_hidden_layers"),
        ({}, {}, {"num_hidden_layers": 3}, "lack 9 weights, e.g. model.layers.2.* that its config.json needs"),
        ({}, {}, {"attention_bias": True}, "lack 8 weights, e.g. .*k_proj.bias, that its config.json needs"),
        ({}, {}, {"vocab_size": 60}, r"weight has shape \[64, 32\] in its files, but \[60, 32\] by its config.json"),
    ],
)
def test_files_that_the_configuration_doesn_t_describe_are_refused(
    saved: dict[str, Any], weights: dict[str, Any], config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Each was loaded as another network, or has a message about transformers' own options."""
    saved_decoder("llama", tmp_path, **saved)
    change(tmp_path, weights, **config)
    with pytest.raises(UserError, match=problem) as caught:
        load_language_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_quantized_weights_without_their_configuration_are_refused(
    dtype: torch.dtype, write_yaml: Write, tmp_path: Path
) -> None:
    """Their numbers were taken for the weights, as many remove quantization_config to load a model without its package."""
    model = saved_decoder("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    config = config_of(write_yaml(model={"init_from": str(tmp_path / "model")}))
    assert plan(config, 1).problems == []
    name = "model.layers.1.mlp.up_proj.weight"
    file = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"][name]
    weights = load_file(tmp_path / "model" / file)
    scale = {f"{name}_scale": torch.ones(1)} if dtype.is_floating_point else {}
    save_file(weights | {name: weights[name].to(dtype), **scale}, tmp_path / "model" / file, metadata={"format": "pt"})
    problem = rf"{name} in {file} has type [IF]\d+(_E4M3)?, and config.json has no quantization_config: expected weights"
    with pytest.raises(UserError, match=rf"^model {tmp_path}/model: {problem}"):
        load_language_model(str(tmp_path / "model"))
    [planned] = plan(config, 1).problems
    assert re.match(rf"model {tmp_path}/model: {problem}", planned)
    change_config(tmp_path / "model", quantization_config={"quant_method": "of a package"})
    assert plan(config, 1).problems == []


def test_a_quantized_encoder_is_refused_and_integer_buffers_are_not(tmp_path: Path) -> None:
    """Encoders of families of their own are read less strictly."""
    saved_decoder("bert", tmp_path)
    write_tokenizer(tmp_path)
    change(tmp_path, {"bert.embeddings.position_ids": torch.arange(16)[None]})
    load_encoder(str(tmp_path))
    name = "bert.encoder.layer.0.output.dense.weight"
    change(tmp_path, {name: load_file(tmp_path / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(UserError, match=rf"{name} in model.safetensors has type I8, and .* dequantize the model first"):
        load_encoder(str(tmp_path))


def test_an_index_that_names_absent_tensors_is_refused(tmp_path: Path) -> None:
    model = saved_decoder("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / index["lm_head.weight"]
    save_file({n: w for n, w in load_file(file).items() if n != "lm_head.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="lack 1 weights"):
        load_language_model(str(tmp_path))


def test_an_exported_encoder_with_more_layers_than_its_configuration_is_refused(tmp_path: Path) -> None:
    """Fine-tuning and evaluation load it without the head."""
    saved_decoder("eurobert", tmp_path)
    write_tokenizer(tmp_path)
    load_encoder(str(tmp_path))
    change(tmp_path, {}, num_hidden_layers=1)
    with pytest.raises(UserError, match=f"9 weights that {ABSENT} "):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("stablelm", "its layers don't pass segments on to their attention function"),
        ("nemotron", "its layers don't pass segments on to their attention function"),
        ("mamba", "tokens attend to other segments"),
        ("jamba", "tokens attend to other segments"),
        ("gpt_oss", r"its code fails \(ValueError: attention sinks are not supported\)"),
    ],
)
def test_families_that_can_t_be_packed_are_refused(family: str, problem: str, tmp_path: Path) -> None:
    saved_decoder(family, tmp_path)
    with pytest.raises(UserError, match=f"{family} can't be trained on packed segments: {problem}") as caught:
        load_language_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_decoder_within_its_base_model_is_refused(tmp_path: Path) -> None:
    """Neither its checkpoints nor its export could be loaded."""
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None}
    saved_decoder("opt", tmp_path, **sizes)
    with pytest.raises(UserError, match="opt isn't supported: its decoder is a part of its base model"):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "bert"])
def test_networks_without_a_list_of_layers_are_refused(family: str, tmp_path: Path) -> None:
    names = {"n_embd": 32, "n_layer": 2, "n_head": 4} if family != "bert" else {"is_decoder": True}
    saved_decoder(family, tmp_path, **names)
    with pytest.raises(UserError, match=f"{family} isn't supported: its base model has no list `layers`, as Llama's"):
        load_language_model(str(tmp_path))


def test_layers_between_backbone_and_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_decoder("modernbert-decoder", tmp_path)
    monkeypatch.setattr(language_model_module, "MODERNBERT_HEADS", {})
    with pytest.raises(UserError, match=r"its head isn't one linear layer \(it has lm_head.dense.weight\)"):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_eurobert_s_own_checkpoints_load_without_their_code(trust_remote_code: bool, tmp_path: Path) -> None:
    """Their config.json is of transformers 4.40 and names code; weights are bf16."""
    original = saved_decoder("eurobert", tmp_path).to(torch.bfloat16)
    original.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert rope["rope_theta"] != 250_000
    auto = {"AutoConfig": "configuration_eurobert.EuroBertConfig"}
    auto |= {f"Auto{name}": f"modeling_eurobert.EuroBert{name}" for name in ("Model", "ModelForMaskedLM")}
    config |= {"rope_theta": 250_000, "rope_scaling": None, "auto_map": auto, "clf_pooling": "late"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_version": "4.40.0.dev0"}))
    model = load_language_model(str(tmp_path), trust_remote_code)
    assert model.config.rope_parameters == {"rope_theta": 250_000, "rope_type": "default"}
    own = original.float().state_dict()
    assert all(torch.equal(weight, own[name.replace("backbone", "model")]) for name, weight in model.state_dict().items())
    write_tokenizer(tmp_path)
    encoder = load_encoder(str(tmp_path), trust_remote_code)
    assert encoder.is_packed and not encoder.is_own_family


def test_a_family_whose_attention_can_t_be_replaced_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("falcon", vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its family's attention can't be replaced"):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("leaks", "tokens attend to other segments"),
        ("always causal", "its layers can't be made bidirectional"),
        ("never causal", "its layers can't be made causal"),
        ("another scale", "its hidden states are not those of its own attention"),
    ],
)
def test_the_probe_finds_wrong_attention(broken: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = attention.BACKEND_FUNCTIONS["sdpa"]

    def wrong(query: Any, key: Any, value: Any, segments: Segments, options: attention.AttentionOptions) -> Any:
        if broken == "leaks":
            segments = Segments.of([query.shape[2]], query.device)
        elif broken == "another scale":
            options = options._replace(scale=2 * options.scale)
        else:
            options = options._replace(causal=broken == "always causal")
        return compute(query, key, value, segments, options)

    model = backbone("llama")
    assert packing_problem(model) is None
    monkeypatch.setitem(attention.BACKEND_FUNCTIONS, "sdpa", wrong)
    assert packing_problem(model) == problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_probe_tells_right_from_wrong_attention_in_half_precision(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights as transformers draws them, bf16 rounding is larger than the error of another scale."""
    config = saved_decoder("llama", tmp_path).config

    def model() -> Any:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)

    language_model_module.language_model_of(model(), "model")
    assert packed_attention(model())(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 2]]), True).dtype == dtype
    compute = attention.BACKEND_FUNCTIONS["sdpa"]

    def scaled(*inputs: Any) -> Any:
        return compute(*inputs[:-1], inputs[-1]._replace(scale=2 * inputs[-1].scale))

    monkeypatch.setitem(attention.BACKEND_FUNCTIONS, "sdpa", scaled)
    wrong = model()
    with pytest.raises(UserError, match="its hidden states are not those of its own attention"):
        packed_attention(wrong)
    assert {weight.dtype for weight in wrong.parameters()} == {dtype}


def test_what_a_run_can_t_keep_up_is_said_at_its_start(
    write_yaml: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base that a later phase can't set is refused, by the plan too; a model that can't be exported is a warning."""
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    saved_decoder("llama", tmp_path / "scaled", rope_parameters=scaled)
    saved_decoder("gemma3_text", tmp_path / "gemma")
    saved_decoder("biogpt", tmp_path / "learned")
    phases = [{"name": "clm", "until": "6ba"}, {"name": "mlm", "model": {"rope_theta": 500.0}}]
    for folder in ("scaled", "gemma", "learned"):
        config = config_of(write_yaml(model={"init_from": str(tmp_path / folder)}, objective__phases=phases))
        problem = r"objective\.phases\.1\.model\.rope_theta: .*/\w+ .*has no plain rotary positions with one base"
        with pytest.raises(UserError, match=problem):
            train(config)
        [planned] = plan(config, 1).problems
        assert re.match(problem, planned)
        assert not (config.run_folder / "metrics.jsonl").exists()
    saved_decoder("eurobert", tmp_path / "biases", attention_bias=True)
    capsys.readouterr()
    train(config_of(write_yaml("biases", model={"init_from": str(tmp_path / "biases")}, max_duration="8ba")))
    assert "WARNING: the model can be trained, but not exported: export: a eurobert model" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="needs Gemma 4")
def test_layers_of_different_sizes_are_refused(write_yaml: Write, tmp_path: Path) -> None:
    saved_decoder("gemma4_text", tmp_path / "gemma4", num_hidden_layers=3)
    config = config_of(write_yaml(model={"init_from": str(tmp_path / "gemma4")}))
    assert any("layers have different sizes" in problem for problem in plan(config, 1).problems)
    with pytest.raises(UserError, match="gemma4_text can't be trained: its layers have different sizes"):
        train(config)


def test_a_run_resumes_without_the_model_that_it_started_from(write_yaml: Write, tmp_path: Path) -> None:
    """It may be gone, such as a checkpoint of a run that goes on, or its folder may have a newer one."""
    saved_decoder("llama", tmp_path / "hub")
    path = write_yaml(model={"init_from": str(tmp_path / "hub")})
    folder = train(config_of(path))
    expected = losses(folder)
    keep_checkpoints_up_to(folder, 6)
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(tmp_path / "hub")
    train(config_of(path))
    assert losses(folder) == expected[6:]
