"""An exported folder is the checkpoint's network, to whoever loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, LlamaConfig

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export import __main__ as command
from biphasic.export.card import run_name_of
from biphasic.export.write import export_encoder, export_language_model
from biphasic.model.attention import Segments
from biphasic.model.backbone import from_hf_config, load_language_model
from biphasic.model.language_model import LanguageModel
from biphasic.model.packed import encode, mean_pool
from conftest import Write
from tiny import LENGTH, MASK, PAD, WORDS, config_of, train

TEXTS = [[5, 6, 7, 8, 9, 2], [10, 11, 2], [12, 13, 14, 15, 2]]


def network(**changes: object) -> LanguageModel:
    """Grouped-query attention, and weights large enough that a wrong path shows."""
    values = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    return from_hf_config(LlamaConfig(**{**values, **changes}), seed=1)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


def padded(left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, TEXTS))
    fill = [[PAD] * (longest - len(text)) for text in TEXTS]
    rows = [f + t if left else t + f for t, f in zip(TEXTS, fill, strict=True)]
    tokens = torch.tensor(rows)
    return tokens, (tokens != PAD).long()


def ours(model: LanguageModel) -> tuple[torch.Tensor, Segments]:
    segments = Segments.of([len(text) for text in TEXTS], torch.device("cpu"))
    tokens = torch.tensor([token for text in TEXTS for token in text])
    with torch.no_grad():
        return encode(model.backbone, tokens, segments, causal=False), segments


@pytest.mark.parametrize("left", [False, True])
def test_same_hidden_states_and_logits(tmp_path: Path, tokenizer: Tokenizer, left: bool) -> None:
    model = network()
    out = tmp_path / "out"
    export_language_model(model, tokenizer, out, "card", dtype=torch.float32)
    expected, _ = ours(model)
    tokens, mask = padded(left)
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(out)(input_ids=tokens, attention_mask=mask).last_hidden_state
        logits = AutoModelForMaskedLM.from_pretrained(out)(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(hidden[mask.bool()], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[mask.bool()], expected @ model.lm_head.weight.T, atol=1e-4, rtol=1e-4)
    assert hidden[~mask.bool()].abs().sum() == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("eurobert", ["EuroBertForMaskedLM"])
    assert config["mask_token_id"] == MASK
    assert "auto_map" not in config


def test_sentence_transformers_gives_the_mean(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from sentence_transformers import SentenceTransformer

    model = network()
    export_encoder(model.backbone, tokenizer, tmp_path / "out", "card", prompts={"query": "w1 ", "document": "w2 "})
    encoder = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert encoder.prompts == {"query": "w1 ", "document": "w2 "}
    texts = ["w5 w6 w7", "w9"]
    ids = tokenizer.encode(texts)
    segments = Segments.of([len(i) for i in ids], torch.device("cpu"))
    with torch.no_grad():
        hidden = encode(model.backbone, torch.tensor([t for i in ids for t in i]), segments, causal=False)
    expected = mean_pool(hidden, segments)
    torch.testing.assert_close(torch.tensor(encoder.encode(texts)), expected, atol=1e-5, rtol=1e-5)


def test_a_run_s_checkpoint_with_its_card(write_yaml: Write, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    folder = train(config_of(write_yaml()))
    checkpoint, out = folder / "checkpoints" / "ba12-rank0.pt", tmp_path / "out"
    assert command.main([str(checkpoint), str(out)]) == 0
    card = ModelCard.load(out / "README.md")
    assert card.data.to_dict()["license"] == "apache-2.0"
    for part in ("| 0 | clm | 6 |", "| 1 | mlm | 6 |", "loss/train/mlm", "masking_ratio: 0.4", "torch 2.7.0"):
        assert part in card.text, part
    trained, exported = load_language_model(str(checkpoint)), load_language_model(str(out))
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name]), name
    # The folder is a start for another run, too.
    config = config_of(write_yaml("again", model={"init_from": str(out)}, max_duration="8ba"))
    train(config)
    # It is replaced only when that is asked for, and nothing else ever is.
    assert command.main([str(checkpoint), str(out)]) == 2
    assert command.main([str(checkpoint), str(out), "--force"]) == 0
    assert command.main([str(checkpoint), str(tmp_path), "--force"]) == 2


def test_initial_weights_are_the_run_s_own(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml(optimizer__lr=1e-30, optimizer__weight_decay=0.0, max_duration="8ba")
    folder = train(config_of(path))
    assert command.main(["--initial", str(path), str(tmp_path / "out")]) == 0
    trained, initial = (
        load_language_model(str(folder / "checkpoints" / "ba8-rank0.pt")),
        load_language_model(str(tmp_path / "out")),
    )
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(weight, initial.state_dict()[name], atol=1e-7, rtol=0)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = AutoConfig.for_model("qwen3", vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                  num_key_value_heads=2, head_dim=8, intermediate_size=48)  # fmt: skip
    with pytest.raises(UserError, match="qwen3 model can't be written as eurobert"):
        export_language_model(from_hf_config(config, 0), tokenizer, tmp_path / "out", "card", dtype=torch.float32)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = network()
    with pytest.raises(TypeError):
        export_language_model(model, tokenizer, tmp_path / "out", None, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"state": {"model": {}}}, tmp_path / "other.pt")
    for name, says in (
        ("missing.pt", "no such file"),
        ("cut.pt", "damaged or incomplete"),
        ("other.pt", "not written by"),
    ):
        assert command.main([str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_end_of_text_goes_on_learning_where_it_is_the_padding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | {"pad_token_id": 2}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model = AutoModel.from_pretrained(tmp_path / "out")
    model(input_ids=torch.tensor([[5, 6, 2]])).last_hidden_state.sum().backward()
    assert model.embed_tokens.weight.grad[2].abs().sum() > 0


def test_no_special_token_is_added_around_a_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Llama 3's tokenizer would put a beginning-of-text token there, which training never saw."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer.tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer.save(tmp_path / "with")
    assert AutoTokenizer.from_pretrained(tmp_path / "with")("w5 w6").input_ids[0] == 1
    export_encoder(network().backbone, load_tokenizer(str(tmp_path / "with")), tmp_path / "out", "card")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w6").input_ids == tokenizer.encode(["w5 w6"])[0]


def test_names_of_the_paper() -> None:
    def name(size: str | None, *phases: dict[str, object], whole: str = "42000ba") -> str:
        config = {
            "model": {"preset": size},
            "objective": {"phases": list(phases)},
            "max_duration": whole,
            "run_name": "mine",
        }
        return run_name_of(config, 42_000)

    mlm = {"name": "mlm", "masking_ratio": 0.4}
    assert name("610m", {"name": "clm"}) == "610m-clm-42k"
    assert name("1b", {**mlm, "masking_ratio": 0.5}) == "1b-mlm50-42k"
    assert name("610m", {"name": "clm", "until": "10000ba"}, mlm) == "610m-clm-10k-mlm40-42k"
    assert name("210m", {"name": "clm", "until": "0.5dur"}, mlm) == "210m-clm-21k-mlm40-42k"
    assert name(None, mlm) == "mine"


def test_importing_biphasic_is_light_and_registers_whenever_transformers_comes() -> None:
    light = "import sys, biphasic; assert not {'torch', 'transformers', 'composer'} & set(sys.modules)"
    orders = (
        "import biphasic; from transformers import AutoConfig; AutoConfig.for_model('eurobert')",
        "from transformers import AutoModel, AutoConfig; import biphasic; AutoConfig.for_model('eurobert')",
        "import biphasic; from transformers import AutoModelForMaskedLM, AutoConfig;"
        "AutoModelForMaskedLM.from_config(AutoConfig.for_model('eurobert', hidden_size=8, num_hidden_layers=1, vocab_size=9,"
        "num_attention_heads=1, num_key_value_heads=1, pad_token_id=0, intermediate_size=8))",
        "import biphasic.model.eurobert; from transformers import AutoConfig; AutoConfig.for_model('eurobert')",
    )
    for code in (light, *orders):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, (code, run.stderr)


@pytest.mark.skipif(
    "BIPHASIC_TRANSFORMERS5_PYTHON" not in os.environ,
    reason="BIPHASIC_TRANSFORMERS5_PYTHON names no interpreter with transformers >= 5 and sentence-transformers",
)
def test_transformers_5_loads_it_natively(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = network()
    out, reference = tmp_path / "out", tmp_path / "reference.safetensors"
    export_language_model(model, tokenizer, out, "card", dtype=torch.float32)
    tokens, mask = padded()
    with torch.no_grad():
        output = AutoModelForMaskedLM.from_pretrained(out)
        hidden = output.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        logits = output(input_ids=tokens, attention_mask=mask).logits
    flat, segments = ours(model)
    expected = {"hidden": hidden, "logits": logits, "embeddings": mean_pool(flat, segments)}
    save_file({"input_ids": tokens, "attention_mask": mask, **expected}, reference)
    script = Path(__file__).parents[1] / "interop" / "check_export.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [os.environ["BIPHASIC_TRANSFORMERS5_PYTHON"], str(script), str(out), str(reference)],
        capture_output=True,
        text=True,
        env=environment,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
