"""The recipes that continue a model or a run, small: the same YAMLs on tiny models, from text to an export."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from biphasic.commands import main
from biphasic.config.convert import ConvertConfig
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.conversion.convert import convert
from biphasic.data.tokenizer import load_tokenizer
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_encoder
from biphasic.model.forward import packed_forward
from biphasic.model.segments import Segments
from biphasic.objectives.batch import Batch, step_of
from biphasic.training.metrics_file import read_metrics
from biphasic.training.switch import ObjectiveSwitch
from helpers.decoders import saved_decoder
from helpers.texts import sentences, write_kind, write_parquet, write_tokenizer
from helpers.tiny import LENGTH, ROOT, SIZE, losses, train, write_rows

RECIPES = ROOT / "recipes"
BATCHES = 6


def small(name: str, folder: Path, model: Path | None, data: Path, **changes: Any) -> PretrainConfig:
    """A recipe's pretrain.yaml, or a file of yamls/, for a tiny model, a tiny dataset and a few batches."""
    keys = {
        "run_name": "small",
        "output": folder / "runs",
        "checkpoint.folder": "null",
        "model.init_from": model or "null",
        "data.folder": data,
        "data.sequence_length": LENGTH,
        "data.num_workers": 0,
        "data.num_canonical_nodes": 2,
        "data.shuffle_block_size": 64,
        "global_batch_size": 8,
        "precision": "fp32",
        "max_duration": f"{BATCHES}ba",
        "optimizer.lr": 5e-3,
        "schedule.warmup": "1ba",
        "schedule.decay": "2ba",
        "evaluation.interval": f"{BATCHES}ba",
        "evaluation.batches": 1,
        "logging.tensorboard": False,
        "logging.progress_bar": False,
        **changes,
    }
    file = ROOT / "yamls" / name if name.endswith(".yaml") else RECIPES / name / "pretrain.yaml"
    config = load(file, [f"{key}={value}" for key, value in keys.items()])
    assert isinstance(config, PretrainConfig)
    return config


@pytest.fixture
def data(dataset: Path, tmp_path: Path) -> Path:
    """The tiny dataset, laid out as a conversion's output; Streaming unpacks beside it."""
    return shutil.copytree(dataset, tmp_path / "data")


def last_checkpoint(folder: Path) -> str:
    return str(folder / "checkpoints" / f"ba{BATCHES}-rank0.pt")


def test_a_decoder_without_a_mask_token_becomes_an_encoder(tmp_path: Path) -> None:
    """Conversion with the decoder's tokenizer, MLM, export; the export is bidirectional and knows the mask token."""
    decoder = tmp_path / "decoder"
    special = {"bos": "<|bos|>", "eos": "<|eos|>"}
    words = load_tokenizer(str(write_tokenizer(decoder, special))).tokenizer.get_vocab_size() - 1
    saved_decoder("llama", decoder, vocab_size=words)
    text = write_parquet(tmp_path / "text.parquet", sentences(800, longest=25))
    conversion = load(
        ROOT / "yamls" / "data" / "own_text.yaml",
        [f"source.paths=[{text}]", f"tokenizer={decoder}", f"output={tmp_path / 'data'}",
         f"sequence_length={LENGTH}", "segments.shortest=4", "validation_fraction=0.1", "cluster.workers=1"],
    )  # fmt: skip
    assert isinstance(conversion, ConvertConfig)
    convert(conversion)
    mask = load_tokenizer(str(tmp_path / "data" / "tokenizer")).mask_id
    assert mask == words  # after the decoder's last id

    folder = train(small("continue_decoder", tmp_path, decoder, tmp_path / "data"))
    values = losses(folder)
    assert len(values) == BATCHES and values[-1] < values[0]

    assert main(["export", last_checkpoint(folder), str(tmp_path / "encoder")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    assert tokenizer.mask_token_id == mask
    encoder = AutoModel.from_pretrained(tmp_path / "encoder").eval()
    assert encoder.get_input_embeddings().num_embeddings == words + 1
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before, after = (encoder(input_ids=t).last_hidden_state[0, 0] for t in (tokens, tokens.where(tokens != 8, 9)))
    assert not torch.allclose(before, after)  # the first token sees the last


def test_a_decoder_with_a_tokenizer_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebuilt model is trained, exported and loaded; its losses in bits per byte are those of the targets' text."""
    decoder = tmp_path / "decoder"
    words = load_tokenizer(str(write_kind(decoder, "metaspace"))).vocab_size
    saved_decoder("llama", decoder, vocab_size=words, pad_token_id=1, bos_token_id=None, eos_token_id=2)
    text = write_parquet(tmp_path / "text.parquet", sentences(800, longest=25))
    own = load_tokenizer(str(write_tokenizer(tmp_path / "own", words=280)))
    conversion = load(
        ROOT / "yamls" / "data" / "own_text.yaml",
        [f"source.paths=[{text}]", f"tokenizer={tmp_path / 'own'}", f"output={tmp_path / 'data'}",
         f"sequence_length={LENGTH}", "segments.shortest=4", "validation_fraction=0.1", "cluster.workers=1"],
    )  # fmt: skip
    assert isinstance(conversion, ConvertConfig)
    convert(conversion)
    batches, prepare = list[Batch](), ObjectiveSwitch.prepare

    def recorded(*given: Any, **named: Any) -> Batch:
        batches.append(prepare(*given, **named))
        return batches[-1]

    def counts_of(batch: Batch) -> tuple[int, int]:
        """Return the number of targets, and of bytes of their text."""
        targets = batch["labels"][batch["labels"] >= 0].tolist()
        return len(targets), sum(len(own.tokenizer.decode([target]).encode()) for target in targets)

    monkeypatch.setattr(ObjectiveSwitch, "prepare", recorded)
    config = small("continue_decoder", tmp_path, decoder, tmp_path / "data", **{
        "model.new_vocabulary": "overlap", "objective.phases": "[{name: clm, until: 3ba}, {name: mlm, masking_ratio: 0.4}]",
        "evaluation.batches": 2, "microbatch_size": 4,
    })  # fmt: skip
    folder = train(config)
    lines = read_metrics(folder / "metrics.jsonl")
    trained = [batch for batch in batches if step_of(batch).phase is not None]
    for line, batch in zip(lines, trained, strict=True):
        (count, size), key = counts_of(batch), f"loss/train/{step_of(batch).objective.name}"
        assert line[f"{key}_bits_per_byte"] == pytest.approx(line[key] * count / math.log(2) / size, rel=1e-5)
    for objective in ("clm", "mlm"):
        validated = [batch for batch in batches if step_of(batch).phase is None]
        counts = [counts_of(batch) for batch in validated if step_of(batch).objective.name == objective]
        count, size = (sum(values) for values in zip(*counts, strict=True))
        assert len(counts) == 2 and size > count
        expected = lines[-1][f"metrics/{objective}/loss"] * count / math.log(2) / size
        assert lines[-1][f"metrics/{objective}/bits_per_byte"] == pytest.approx(expected, rel=1e-5)

    assert main(["export", last_checkpoint(folder), str(tmp_path / "encoder")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "encoder").get_vocab() == own.tokenizer.get_vocab()
    checkpoint, tokens = load_language_model(last_checkpoint(folder)), torch.arange(4, 30)
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "encoder").eval()
    with torch.no_grad():
        hidden = packed_forward(checkpoint.backbone, tokens, Segments.of([26], tokens.device), causal=False)
        torch.testing.assert_close(exported(tokens[None]).logits[0], checkpoint.lm_head(hidden), rtol=1e-4, atol=1e-5)
    assert exported.config.vocab_size == own.vocab_size == checkpoint.lm_head.out_features


def test_the_clm_detour_of_an_encoder(data: Path, tmp_path: Path) -> None:
    saved_decoder("eurobert", tmp_path / "model")
    phases = "[{name: clm, until: 4ba}, {name: mlm, masking_ratio: 0.4}]"
    config = small("clm_detour", tmp_path, tmp_path / "model", data, **{"objective.phases": phases})
    checkpoint = load_language_model(last_checkpoint(train(config)))
    assert checkpoint.config.model_type == "eurobert"
    before = load_language_model(str(tmp_path / "model"))
    assert not torch.equal(checkpoint.lm_head.weight, before.lm_head.weight)


@pytest.mark.parametrize("family", ["modernbert", "modernbert-decoder"])
def test_the_clm_detour_of_modernbert(family: str, tmp_path: Path) -> None:
    """Text becomes rows with [CLS] and [SEP]; the export is ModernBERT's own class with its head, and its tokenizer."""
    model, special = tmp_path / "model", {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    tokenizer = load_tokenizer(str(write_tokenizer(model, special)))
    changes = {"max_position_embeddings": LENGTH, "pad_token_id": 2, "num_hidden_layers": 3}
    saved_decoder(family, model, vocab_size=tokenizer.vocab_size, **changes)
    tokenizer.adding_special_tokens([0], [1]).save(model)
    text = write_parquet(tmp_path / "text.parquet", sentences(800, longest=25))
    conversion = load(
        ROOT / "yamls" / "data" / "own_text.yaml",
        [f"source.paths=[{text}]", f"tokenizer={model}", f"output={tmp_path / 'data'}", "add_bos=true",
         f"sequence_length={LENGTH}", "segments.shortest=4", "validation_fraction=0.1", "cluster.workers=1"],
    )  # fmt: skip
    assert isinstance(conversion, ConvertConfig)
    convert(conversion)
    phases = {"objective.phases": "[{name: clm, until: 4ba}, {name: mlm, masking_ratio: 0.4}]"}
    folder = train(small("clm_detour", tmp_path, model, tmp_path / "data", **phases))
    values = losses(folder)
    assert len(values) == BATCHES and values[3] < values[0]

    assert main(["export", last_checkpoint(folder), str(tmp_path / "encoder")]) == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "encoder")("some text").input_ids
    assert (ids[0], ids[-1]) == (0, 1)
    for path in (last_checkpoint(folder), str(tmp_path / "encoder")):
        texts = load_encoder(path).text_tokenizer
        assert (texts.prefix, texts.suffix) == ((0,), (1,))
    encoder = AutoModelForMaskedLM.from_pretrained(tmp_path / "encoder").eval()
    assert encoder.config.model_type == "modernbert"
    trained, tokens = load_language_model(last_checkpoint(folder)), torch.tensor([ids])
    assert trained.head is not None
    with torch.no_grad():
        hidden = packed_forward(trained.backbone, tokens[0], Segments.of([len(ids)], tokens.device), causal=False)
        expected = trained.lm_head(trained.head(hidden))
        torch.testing.assert_close(encoder(tokens).logits[0], expected, atol=1e-5, rtol=1e-5)


def test_the_decay_has_longer_rows(data: Path, tmp_path: Path) -> None:
    """The whole run, and its last phase alone, from a run of the YAML that it builds on."""
    write_rows(tmp_path / "long" / "train", 500, seed=5, length=2 * LENGTH)
    model = {"model.preset": "null", **{f"model.{key}": value for key, value in SIZE.items()}}
    base = {**model, "objective.phases.0.until": "2ba"}
    longer = {
        **base,
        "objective.phases.1.until": f"{BATCHES - 2}ba",
        "objective.phases.2.data.folder": tmp_path / "long",
        "objective.phases.2.data.sequence_length": 2 * LENGTH,
        "objective.phases.2.global_batch_size": 4,
    }
    trunk = train(small("610m_biphasic.yaml", tmp_path, None, data, run_name="trunk", **base))
    branch = train(small("long_context", tmp_path, None, data, run_name="branch", start_from=trunk, **longer))
    whole = train(small("long_context", tmp_path, None, data, run_name="whole", **longer))
    assert len(losses(branch)) == 2 and losses(branch) == losses(whole)[-2:]
    assert losses(whole)[:-2] == losses(trunk)[:-2] and losses(whole)[-2:] != losses(trunk)[-2:]

    assert main(["export", last_checkpoint(branch), str(tmp_path / "encoder")]) == 0
    config = AutoModel.from_pretrained(tmp_path / "encoder").config
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (2 * LENGTH, 250_000.0)


def test_a_model_is_continued_on_longer_rows(data: Path, tmp_path: Path) -> None:
    """Without its run, by the keys beside `model.init_from`."""
    saved_decoder("eurobert", tmp_path / "model", max_position_embeddings=LENGTH // 2)
    longer = {"model.max_position_embeddings": LENGTH, "model.rope_theta": 250_000.0}
    folder = train(small("continue_decoder", tmp_path, tmp_path / "model", data, **longer))
    assert main(["export", last_checkpoint(folder), str(tmp_path / "encoder")]) == 0
    config = AutoModel.from_pretrained(tmp_path / "encoder").config
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (LENGTH, 250_000.0)
