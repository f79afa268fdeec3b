"""An exported folder holds the checkpoint's network, for every library that loads it."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from biphasic.checkpointing.merge import merge_checkpoints
from biphasic.commands import main
from biphasic.config.load import dump
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from biphasic.export.card import pretrained_card
from biphasic.export.run import export_checkpoint
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_encoder
from biphasic.model.forward import packed_forward
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import load_text_tokenizer
from conftest import Write
from helpers.exports import export_encoder, export_language_model
from helpers.stored_checkpoints import checkpoint_of, network
from helpers.tiny import EOS, LENGTH, MASK, PAD, config_of, train


@pytest.fixture
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


def test_export_of_a_run_s_checkpoint_with_its_card(write_yaml: Write, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    folder = train(config_of(write_yaml()))
    checkpoint, out = folder / "checkpoints" / "ba12-rank0.pt", tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    card = ModelCard.load(out / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["library_name"]) == ("apache-2.0", "transformers")
    assert data["pipeline_tag"] == "feature-extraction"
    assert card.text.lstrip().startswith("# run\n")
    software = f"torch {version('torch')}"
    for part in ("| 0 | clm | 6 |", "| 1 | mlm | 6 |", "loss/train/mlm", "masking_ratio: 0.4", software):
        assert part in card.text, part
    trained, exported = load_language_model(str(checkpoint)), load_language_model(str(out))
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name]), name
    # Another run can start from the folder, and its checkpoint can be exported in turn.
    again = train(config_of(write_yaml("again", model={"init_from": str(out)}, max_duration="8ba")))
    assert main(["export", str(again / "checkpoints" / "ba4-rank0.pt"), str(tmp_path / "second")]) == 0
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "second"))
    assert first == second
    assert "\n# again-4\n" in (tmp_path / "second" / "README.md").read_text()
    # An export is replaced only with --force, and anything else never.
    assert main(["export", str(checkpoint), str(out)]) == 2
    assert main(["export", str(checkpoint), str(out), "--force"]) == 0
    assert main(["export", str(checkpoint), str(tmp_path), "--force"]) == 2


def test_initial_weights_are_those_of_the_run(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml(optimizer__lr=1e-30, optimizer__weight_decay=0.0, max_duration="8ba")
    folder = train(config_of(path, seed=8))
    assert main(["export-initial", str(path), str(tmp_path / "out"), "seed=8"]) == 0
    trained, initial = (
        load_language_model(str(folder / "checkpoints" / "ba8-rank0.pt")),
        load_language_model(str(tmp_path / "out")),
    )
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(weight, initial.state_dict()[name], atol=1e-7, rtol=0)


def test_a_failed_export_keeps_the_earlier_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
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


def test_no_folder_is_written_in_place_of_a_mount_point(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a container, for example: a rename onto it fails, after all the work."""
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume)
    words = f"^{volume}: is a mount point, which can't be replaced by a finished folder: name a folder in it$"
    with pytest.raises(UserError, match=words):
        export_encoder(network().backbone, tokenizer, volume, "card")
    with pytest.raises(UserError, match=words):
        merge_checkpoints([str(tmp_path / "a"), str(tmp_path / "b")], volume)
    export_encoder(network().backbone, tokenizer, volume / "model", "card")


def test_unusable_checkpoints_are_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"state": {"model": {}}}, tmp_path / "other.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    (tmp_path / "text.yaml").write_text("job: pretrain")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(b"cut off")
    for name, message in (
        ("missing.pt", "is not there; expected a .pt file"),
        ("cut.pt", "damaged or incomplete"),
        ("sharded", "damaged or incomplete"),
        ("text.yaml", "Expected input to be a checkpoint returned by torch.save"),
        ("other.pt", "not written by"),
        ("tensor.pt", "not written by"),
    ):
        assert main(["export", str(tmp_path / name), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_padding_token_s_embedding_has_a_gradient(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """In EuroBERT's tokenizer it is the end of text; transformers gives it no gradient."""
    out = tmp_path / "out"
    export_language_model(network(), tokenizer, out)
    config = json.loads((out / "config.json").read_text()) | {"pad_token_id": EOS}
    (out / "config.json").write_text(json.dumps(config))
    start = load_language_model(str(out))
    assert start.config.pad_token_id == EOS
    checkpoint = checkpoint_of(start, tmp_path, tmp_path, sharded=False)
    resumed = load_language_model(str(checkpoint))
    for backbone in (start.backbone, resumed.backbone, load_encoder(str(out)).backbone):
        tokens = torch.tensor([5, 6, EOS])
        packed_forward(backbone, tokens, Segments.of([3], tokens.device), causal=False).sum().backward()
        assert backbone.get_input_embeddings().weight.grad[EOS].abs().sum() > 0  # pyright: ignore


def test_no_special_token_is_added_around_a_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Llama 3's tokenizer would add a beginning-of-text token, which training never had."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer.tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer.save(tmp_path / "with")
    assert AutoTokenizer.from_pretrained(tmp_path / "with")("w5 w6").input_ids[0] == 1
    export_encoder(network().backbone, load_tokenizer(str(tmp_path / "with")), tmp_path / "out", "card")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("w5 w6").input_ids == tokenizer.encode(["w5 w6"])[0]


@pytest.mark.parametrize("add_bos", [False, True])
def test_an_export_reads_texts_as_its_checkpoint_does(tmp_path: Path, dataset: Path, add_bos: bool) -> None:
    """With BOS where training had it, and up to the longest row of training, not to the model's last position."""
    from transformers import AutoTokenizer

    model, folder = network(max_position_embeddings=4 * LENGTH), str(dataset / "tokenizer")
    data = {"tokenizer_sha256": load_tokenizer(folder).sha256, **({"add_bos": True} if add_bos else {})}
    checkpoint = str(checkpoint_of(model, tmp_path, Path(folder), sharded=False, data=data))
    export_checkpoint(checkpoint, tmp_path / "out")
    texts = ["w5 w6", "w7 " * 2 * LENGTH]
    expected, read = (load_text_tokenizer(path) for path in (checkpoint, str(tmp_path / "out")))
    rows = [ids for ids, _ in read.tokenize_and_count(texts, read.max_length)]
    assert rows == [ids for ids, _ in expected.tokenize_and_count(texts, expected.max_length)] and len(rows[1]) == LENGTH
    assert (rows[0][0] == load_tokenizer(folder).role_ids["bos"]) is add_bos and len(rows[0]) == 2 + add_bos
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(texts, truncation=True).input_ids == rows
    sentence_settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert sentence_settings["max_seq_length"] == LENGTH
    sentence = "puts a beginning-of-text token before" if add_bos else "have no beginning-of-text token"
    assert sentence in (tmp_path / "out" / "README.md").read_text()


def test_the_original_tokenizer_s_settings_are_replaced(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A decoder's own class would add a beginning of text again, or need code."""
    from transformers import AutoTokenizer

    original = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "auto_map": {},
        "name_or_path": "/home/me",
    }
    tokenizer.settings.update(original)
    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"add_bos_token", "auto_map", "name_or_path"} & set(settings)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert list(loaded("w5 w6")) == ["input_ids", "attention_mask"]
    assert len(loaded("w5 " * 100, truncation=True).input_ids) == LENGTH
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id) == (PAD, EOS, MASK)
    assert loaded("w5 <|mask|>").input_ids[-1] == MASK
    assert load_tokenizer(str(tmp_path / "out")).sha256 == tokenizer.sha256


def test_the_embedding_of_an_empty_text_is_zero_beside_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from sentence_transformers import SentenceTransformer

    export_encoder(network().backbone, tokenizer, tmp_path / "out", "card")
    embeddings = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(["w5", ""])
    assert embeddings[0].any()
    assert not embeddings[1].any()


def test_the_card_has_no_credentials_and_escapes_tables(write_yaml: Write) -> None:
    config = config_of(write_yaml(logging__mlflow="https://host/x"))
    # A YAML with credentials is refused; the card doesn't rely on it.
    text = dump(config).replace("https://host", "https://me:secret@host")
    record = {
        **{name: 6 for name in ("batches", "rows", "tokens", "epochs", "ranks", "seconds")},
        **{"config": text, "command": "main.py a|b", "versions": {}, "hardware": "none", "losses": {}},
        "phases": [
            {"name": "clm", "words": "CLM", "causal": True, "batches": 6, "tokens": 6},
            {"name": "mlm", "words": "MLM", "causal": False, "batches": 0, "tokens": 0},
        ],
        "data": {"source": {"kind": "hub", "path": "org/set", "name": None}, "tokens": 5, "tokenizer_sha256": "ab"},
    }
    card = pretrained_card(record)
    assert "secret" not in card
    assert "https://host/x" in card
    assert r"a\|b" in card
    assert "org/set: 5 tokens" in card
    assert "trained with causal attention" in card
    record["phases"][1]["batches"] = 1
    assert "trained with causal attention" not in pretrained_card(record)
