"""An exported folder is the checkpoint's network, to whoever loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from biphasic.config.errors import UserError
from biphasic.config.load import dump
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export import __main__ as command
from biphasic.export.card import model_name, pretrained_card
from biphasic.export.write import export_encoder, export_language_model
from biphasic.model.backbone import load_language_model
from biphasic.model.packed import encode, mean_pool
from biphasic.model.segments import Segments
from conftest import Write
from decoders import packed, padded
from stored_checkpoints import network
from tiny import EOS, LENGTH, MASK, PAD, config_of, train


@pytest.fixture
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


@pytest.mark.parametrize("left", [False, True])
def test_same_hidden_states_and_logits(tmp_path: Path, tokenizer: Tokenizer, left: bool) -> None:
    model = network()
    out = tmp_path / "out"
    export_language_model(model, tokenizer, out, "card", dtype=torch.float32)
    expected = packed(model.backbone)
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
    data = card.data.to_dict()
    assert (data["license"], data["library_name"]) == ("apache-2.0", "transformers")
    assert data["pipeline_tag"] == "feature-extraction"
    assert card.text.lstrip().startswith("# run\n")
    for part in ("| 0 | clm | 6 |", "| 1 | mlm | 6 |", "loss/train/mlm", "masking_ratio: 0.4", "torch 2.7.0"):
        assert part in card.text, part
    trained, exported = load_language_model(str(checkpoint)), load_language_model(str(out))
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name]), name
    # The folder is a start for another run, too, whose checkpoint can be exported in turn.
    again = train(config_of(write_yaml("again", model={"init_from": str(out)}, max_duration="8ba")))
    assert command.main([str(again / "checkpoints" / "ba4-rank0.pt"), str(tmp_path / "second")]) == 0
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "second"))
    assert first == second
    assert "\n# again-4\n" in (tmp_path / "second" / "README.md").read_text()
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


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    backbone, out = network().backbone, tmp_path / "out"
    with pytest.raises(TypeError):
        export_encoder(backbone, tokenizer, out, None)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
    export_encoder(backbone, tokenizer, out, "first")
    with pytest.raises(TypeError):
        export_encoder(backbone, tokenizer, out, None, force=True)  # pyright: ignore[reportArgumentType]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "README.md").read_text() == "first"
    export_encoder(backbone, tokenizer, out, "second", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "README.md").read_text() == "second"
    with pytest.raises(UserError, match="can't be written"):
        export_encoder(backbone, tokenizer, out / "README.md" / "below", "card")


def test_checkpoints_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"state": {"model": {}}}, tmp_path / "other.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    (tmp_path / "text.yaml").write_text("job: pretrain")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(b"cut off")
    for name, says in (
        ("missing.pt", "no such file"),
        ("cut.pt", "damaged or incomplete"),
        ("sharded", "damaged or incomplete"),
        ("text.yaml", "not what torch.save writes"),
        ("other.pt", "not written by"),
        ("tensor.pt", "not written by"),
    ):
        assert command.main([str(tmp_path / name), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
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
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("w5 w6").input_ids == tokenizer.encode(["w5 w6"])[0]


def test_the_tokenizer_s_settings_are_the_encoder_s(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A decoder's own class would add a beginning of text again, or need code; its other settings aren't for an encoder."""
    from transformers import AutoTokenizer

    stale = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "auto_map": {}, "name_or_path": "/home/me"}
    tokenizer.settings.update(stale)
    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"add_bos_token", "auto_map", "name_or_path"} & set(settings)
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert list(found("w5 w6")) == ["input_ids", "attention_mask"]
    assert len(found("w5 " * 100, truncation=True).input_ids) == LENGTH
    assert (found.pad_token_id, found.eos_token_id, found.mask_token_id) == (PAD, EOS, MASK)
    assert found("w5 <|mask|>").input_ids[-1] == MASK
    assert load_tokenizer(str(tmp_path / "out")).sha256 == tokenizer.sha256


def test_a_text_without_a_token_is_zeros(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from sentence_transformers import SentenceTransformer

    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    encoder = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert encoder.encode([""]).any() == encoder.encode(["w5", ""])[1].any() == False  # noqa: E712
    assert encoder.encode(["w5", ""])[0].any()


def test_what_the_encoder_does_not_do_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    model, (tokens, mask) = AutoModel.from_pretrained(tmp_path / "out", attn_implementation="sdpa"), padded()
    for refused in ({"position_ids": tokens}, {"output_hidden_states": True}, {"inputs_embeds": tokens.float()}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            model(input_ids=tokens, attention_mask=mask, **refused)
    with pytest.raises(ValueError, match="input_ids"):
        model(attention_mask=mask)
    output = model(input_ids=tokens, attention_mask=mask, output_hidden_states=False)
    assert output.last_hidden_state.shape[:2] == tokens.shape


def test_losses_of_the_heads(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Those of transformers 5's classes: by problem type, over the labels that are not -100."""
    out = tmp_path / "out"
    export_language_model(network(), tokenizer, out, "card", dtype=torch.float32)
    tokens, mask = padded()
    labels = torch.where(mask.bool() & (tokens % 2 == 0), tokens, -100)
    output = AutoModelForMaskedLM.from_pretrained(out)(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits[labels > 0], labels[labels > 0]))
    model = AutoModelForTokenClassification.from_pretrained(out, num_labels=3)
    output = model(input_ids=tokens, attention_mask=mask, labels=torch.where(labels > 0, labels % 3, -100))
    torch.testing.assert_close(output.loss, cross_entropy(output.logits[labels > 0], labels[labels > 0] % 3))
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    for wanted, loss in (
        (torch.tensor([0, 2, 1]), cross_entropy),
        (several, binary_cross_entropy_with_logits),
    ):
        model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=3)
        output = model(input_ids=tokens, attention_mask=mask, labels=wanted)
        torch.testing.assert_close(output.loss, loss(output.logits, wanted))
    model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=1)
    output = model(input_ids=tokens, attention_mask=mask, labels=several[:, 0])
    torch.testing.assert_close(output.loss, mse_loss(output.logits[:, 0], several[:, 0]))


def test_rotary_positions_are_said_in_both_versions_words() -> None:
    """A configuration written by transformers 5 has only `rope_parameters`, and leaves out what is its default."""
    theirs = AutoConfig.for_model("eurobert", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert (theirs.rope_theta, theirs.rope_scaling) == (500.0, None)
    scaled = AutoConfig.for_model(
        "eurobert", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    )
    assert scaled.rope_scaling["factor"] == 2.0
    assert scaled.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    plain = AutoConfig.for_model("eurobert")
    assert (plain.rope_theta, plain.max_position_embeddings, plain.head_dim) == (10_000.0, 8192, 64)


def test_names_of_the_paper() -> None:
    def name(size: str | None, *phases: dict[str, object], whole: str = "42000ba", batches: int = 42_000) -> str:
        config = {
            "model": {"preset": size},
            "objective": {"phases": list(phases)},
            "max_duration": whole,
            "run_name": "mine",
        }
        return model_name(config, {"batches": batches, "rows": 0, "tokens": 0, "epochs": 0})

    mlm = {"name": "mlm", "masking_ratio": 0.4}
    assert name("610m", {"name": "clm"}) == "610m-clm-42k"
    assert name("1b", {**mlm, "masking_ratio": 0.5}) == "1b-mlm50-42k"
    assert name("610m", {"name": "clm", "until": "10000ba"}, mlm) == "610m-clm-10k-mlm40-42k"
    assert name("210m", {"name": "clm", "until": "0.5dur"}, mlm) == "210m-clm-21k-mlm40-42k"
    assert name(None, mlm) == "mine"
    assert name("610m", mlm, batches=1000) == "610m-mlm40-42k-1000"
    assert name("610m", {"name": "clm", "until": "10000ba"}, mlm, batches=5000) == "610m-clm-10k-mlm40-42k-5000"
    assert name("610m", {**mlm, "masking_ratio": {"start": 0.3, "end": 0.05}}, whole="50ba") == "610m-mlm-50"
    assert name("610m", {"name": "clm"}, whole="1000000tok") == "610m-clm-1000000tok-42000"


def test_the_card_tells_no_login_and_keeps_its_tables(write_yaml: Write) -> None:
    config = config_of(write_yaml(logging__mlflow={"experiment": "e", "tracking_uri": "https://host/x"}))
    # A YAML with a login is refused; the card doesn't rely on it.
    said = dump(config).replace("https://host", "https://me:secret@host")
    record = {
        **{name: 6 for name in ("batches", "rows", "tokens", "epochs", "ranks", "seconds")},
        **{"config": said, "command": "main.py a|b", "versions": {}, "hardware": "none", "losses": {}},
        "phases": [{"name": "clm", "batches": 6, "tokens": 6}, {"name": "mlm", "batches": 0, "tokens": 0}],
        "data": {"source": {"kind": "hub", "path": "org/set", "name": None}, "tokens": 5, "tokenizer_sha256": "ab"},
    }
    card = pretrained_card(record)
    assert "secret" not in card
    assert "https://host/x" in card
    assert r"a\|b" in card
    assert "org/set: 5 tokens" in card
    assert "trained to look back only" in card
    record["phases"][1]["batches"] = 1
    assert "trained to look back only" not in pretrained_card(record)


def test_importing_biphasic_is_light_and_registers_whenever_transformers_comes() -> None:
    light = "import sys, biphasic; assert not {'torch', 'transformers', 'composer'} & set(sys.modules)"
    sizes = "vocab_size=9, hidden_size=8, num_attention_heads=1, num_hidden_layers=1, pad_token_id=0"
    small = f"AutoConfig.for_model('eurobert', {sizes})"
    orders = (
        f"import biphasic; from transformers import AutoConfig; {small}",
        f"from transformers import AutoModel, AutoConfig; import biphasic; AutoModel.from_config({small})",
        f"import biphasic; from transformers import AutoModelForMaskedLM as A, AutoConfig; A.from_config({small})",
    )
    for code in (light, *orders):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, (code, run.stderr)
