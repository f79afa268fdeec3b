"""Exports of other decoder families load as encoders, only with their file of code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from biphasic.export import formats
from biphasic.export.finetuned import require_exportable
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.language_model import LanguageModel
from biphasic.model.text_tokenizer import TextTokenizer
from conftest import Write
from helpers.decoders import FAMILIES, decoder, packed, padded, saved_decoder
from helpers.exports import export_language_model
from helpers.stored_checkpoints import network
from helpers.tiny import LENGTH, PAD, config_of, train, write_tokenizer

TRUSTED: dict[str, Any] = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> LanguageModel:
    return decoder(family)


@pytest.fixture(scope="module")
def out(model: LanguageModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    """One export for all tests of a family; a test that changes it makes a copy."""
    # transformers keeps the code that it has run under the folder's name.
    folder = tmp_path_factory.mktemp("families") / f"out-{family}"
    export_language_model(model, tokenizer, folder)
    return folder


def implementations(family: str) -> list[str]:
    return ["eager"] if family == "gemma2" else ["eager", "sdpa"]


def test_nothing_loads_without_the_code(out: Path, family: str, tmp_path: Path) -> None:
    out = shutil.copytree(out, tmp_path / f"without-{family}")
    for auto in (AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            auto.from_pretrained(out, trust_remote_code=False)
    (out / "bidirectional.py").unlink()
    with pytest.raises((OSError, ValueError)):
        AutoModel.from_pretrained(out, **TRUSTED)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == f"bidirectional_{family}"
    # All values that define the network are written, even the family's defaults.
    norm = "layer_norm_eps" if family == "cohere" else "rms_norm_eps"
    assert {norm, "tie_word_embeddings", "attention_dropout", "num_key_value_heads"} <= set(config)
    del config["auto_map"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"bidirectional_{family}"):
        AutoModel.from_pretrained(out)


def test_attention_without_the_mask_is_refused(out: Path, family: str) -> None:
    unsupported = ["flex_attention", "flash_attention_2"] + (["sdpa"] if family == "gemma2" else [])
    for implementation in unsupported:
        with pytest.raises((ValueError, ImportError)):
            AutoModel.from_pretrained(out, attn_implementation=implementation, **TRUSTED)
    encoder = AutoModel.from_pretrained(out, **TRUSTED).eval()
    encoder.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="eager or sdpa, not flash_attention_2"):
        encoder(torch.tensor([[5, 6]]))
    encoder = AutoModel.from_pretrained(out, **TRUSTED)
    with pytest.raises(ValueError, match="position_ids can't be given"):
        encoder(torch.tensor([[5, 6]]), position_ids=torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match=r"attention_mask of \[batch, length\]"):
        encoder(torch.tensor([[5, 6]]), torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="takes input_ids or inputs_embeds"):
        encoder()


def test_biphasic_loads_it_without_the_code(model: LanguageModel, out: Path, family: str, tmp_path: Path) -> None:
    out = shutil.copytree(out, tmp_path / f"ours-{family}")
    (out / "bidirectional.py").unlink()
    expected = packed(model.backbone)
    loaded = load_language_model(str(out))
    assert loaded.config.model_type == family
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    encoder = load_encoder(str(out))
    assert encoder.is_packed
    assert encoder.text_tokenizer.max_length == LENGTH
    torch.testing.assert_close(packed(encoder.backbone), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(packed(loaded.backbone), expected, atol=1e-6, rtol=1e-5)
    # Where padding and end of text are one token, it still learns.
    assert encoder.backbone.get_input_embeddings().padding_idx is None  # pyright: ignore
    # trust_remote_code changes nothing: the code isn't needed, and isn't run.
    assert load_encoder(str(out), trust_remote_code=True).is_packed


@pytest.mark.parametrize("family", ["gpt_neox", "biogpt"])
def test_biphasic_loads_a_family_with_other_names_of_its_parts(family: str, tmp_path: Path) -> None:
    """An export calls them `model` and `lm_head`."""
    saved_decoder(family, tmp_path / "hub")
    write_tokenizer(tmp_path / "hub")
    model = load_language_model(str(tmp_path / "hub")).eval()
    export_language_model(model, load_tokenizer(str(tmp_path / "hub")), tmp_path / "export")
    loaded = load_language_model(str(tmp_path / "export")).eval()
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    assert torch.equal(packed(load_encoder(str(tmp_path / "export")).backbone.eval()), packed(model.backbone))


def test_it_trains_in_transformers(out: Path, family: str, tmp_path: Path) -> None:
    """Every weight has a gradient, the padding's embedding too, and a trained model is saved and loads again."""
    model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=3, **TRUSTED)
    model.gradient_checkpointing_enable()
    tokens, mask = padded()
    model.train()(input_ids=tokens, attention_mask=mask, labels=torch.tensor([0, 1, 2])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model = AutoModelForMaskedLM.from_pretrained(out, **TRUSTED)
    logits = model.eval()(input_ids=tokens, attention_mask=mask, labels=tokens)
    kept = torch.nn.functional.cross_entropy(logits.logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(logits.loss, kept)
    encoder = AutoModel.from_pretrained(out, **TRUSTED)
    encoder(torch.tensor([[PAD, 5]])).last_hidden_state.sum().backward()
    assert encoder.embed_tokens.weight.grad[PAD].abs().sum() > 0
    again = tmp_path / f"again-{family}"
    model.save_pretrained(again)
    loaded = AutoModelForMaskedLM.from_pretrained(again, **TRUSTED).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens, attention_mask=mask).logits, logits.logits)


def test_trainer_s_gradient_accumulation(out: Path, tmp_path: Path) -> None:
    """Trainer multiplies the gradients of a class that takes arguments for the loss and doesn't say how it uses them."""
    tokens, mask = padded()
    rows = [
        {"input_ids": ids, "attention_mask": kept, "labels": torch.tensor(index % 2)}
        for index, (ids, kept) in enumerate(zip(tokens[:2], mask[:2], strict=True))
    ]
    seen: list[tuple[float, float]] = []
    for steps in (1, 2):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=2, **TRUSTED)
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2 // steps, gradient_accumulation_steps=steps, max_steps=1,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)  # pyright: ignore[reportArgumentType]
        trainer.train()
        log = trainer.state.log_history[0]
        seen.append((float(log["loss"]), float(log["grad_norm"])))
    assert seen[0] == pytest.approx(seen[1], rel=1e-3)


def test_half_precision_and_empty_texts(out: Path, family: str) -> None:
    """Rows without a token give no NaN."""
    tokens, mask = padded()
    mask[1] = 0
    for implementation in implementations(family):
        encoder = AutoModel.from_pretrained(out, attn_implementation=implementation, **TRUSTED).eval()
        with torch.no_grad():
            expected = encoder(tokens, mask).last_hidden_state
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype=dtype):
                    half = encoder(tokens, mask).last_hidden_state
                assert torch.isfinite(half).all()
            cast = encoder.to(torch.bfloat16)(tokens, mask).last_hidden_state
        assert torch.isfinite(expected).all()
        assert torch.isfinite(cast).all()
        # Some GPU kernels give NaN for a query without keys.
        masks = encoder._masks(mask.bool(), (mask.cumsum(1) - 1).clamp(min=0))
        for mask_ in masks.values() if isinstance(masks, dict) else [masks]:
            assert (mask_ if mask_.dtype == torch.bool else mask_ == 0).any(-1).all()


@torch.no_grad()
def test_a_classifier_s_mean_of_an_empty_text_is_zero(out: Path) -> None:
    tokens, mask = padded()
    mask[1] = 0
    model = AutoModelForSequenceClassification.from_pretrained(out, num_labels=3, **TRUSTED).eval()
    logits = model(input_ids=tokens, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    zero = torch.zeros(1, model.config.hidden_size)
    torch.testing.assert_close(logits[1:2], model.classifier(model.activation(model.dense(zero))))


def test_export_of_a_run_s_checkpoint(write_yaml: Write, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A run starts from an exported decoder, and its checkpoint is exported."""
    from biphasic.commands import main

    export_language_model(decoder("qwen3"), tokenizer, tmp_path / "start")
    changes = {"schedule": {}, "objective": {"phases": [{"name": "mlm"}]}, "max_duration": "2ba"}
    folder = train(config_of(write_yaml(model={"init_from": str(tmp_path / "start")}, **changes)))
    checkpoint, out = folder / "checkpoints" / "ba2-rank0.pt", tmp_path / "trained-qwen3"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert "trust_remote_code=True" in (out / "README.md").read_text()
    expected = packed(load_encoder(str(checkpoint)).backbone)
    tokens, mask = padded()
    encoder = AutoModel.from_pretrained(out, **TRUSTED).eval()
    with torch.no_grad():
        hidden = encoder(tokens, mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def test_code_with_other_results_is_refused(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check on a small network finds a causal mask, a window that is too wide by one, and wrong positions."""
    template = (Path(formats.__file__).with_name("bidirectional_template.py")).read_text()
    for before, after in (
        ("full = kept[:, None, None, :] | itself", "full = kept[:, None, None, :].tril() | itself"),
        ("distance.abs() < window", "distance.abs() <= window"),
        ("(kept.long().cumsum(1) - 1).clamp(min=0)", "(2 * kept.long().cumsum(1) - 1).clamp(min=0)"),
    ):
        assert before in template
        (tmp_path / "template.py").write_text(template.replace(before, after))
        monkeypatch.setattr(formats, "_TEMPLATE", tmp_path / "template.py")
        with pytest.raises(UserError, match=r"mistral model can't be written: the results of transformers would differ"):
            export_language_model(decoder("mistral"), tokenizer, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_a_head_with_a_bias(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Phi's: the exported class has it too, and Biphasic goes on with it."""
    saved_decoder("phi", tmp_path / "phi")
    model = load_language_model(str(tmp_path / "phi"))
    out = tmp_path / "out-phi"
    export_language_model(model, tokenizer, out)
    written = AutoModelForMaskedLM.from_pretrained(out, **TRUSTED).eval()
    tokens, mask = padded()
    expected = model.lm_head(packed(model.backbone))
    assert model.lm_head.bias.abs().min() > 0
    torch.testing.assert_close(written(tokens, mask).logits[mask.bool()], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(load_language_model(str(out)).lm_head.bias, model.lm_head.bias)


def test_networks_that_cannot_be_written_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = decoder("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UserError, match=r"qwen3 model can't be written: it has layers of unknown kinds: chunked_attention"):
        export_language_model(model, tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match=r"gpt2 model can't be written: .* small network \('num_hidden_layers'\)"):
        formats.choose_format(AutoConfig.for_model("gpt2"), tokenizer)
    scaled = network()
    scaled.config.model_type = "eurobert"
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    encoder = Encoder(scaled.backbone, TextTokenizer(tokenizer, LENGTH))
    with pytest.raises(UserError, match=r"eurobert model with rope scaling .*; save_model=false trains and scores"):
        require_exportable(encoder)
