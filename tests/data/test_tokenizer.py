import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.hub_server import Repository, serve_hub
from helpers.texts import SPECIAL, write_tokenizer


def test_special_tokens_by_role(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (0, 1, 2, 3)
    assert tokenizer.special_ids == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 300


def test_special_tokens_in_a_text_are_encoded_as_text(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    [ids] = tokenizer.encode(["reads <|eos|> and <|mask|> left"])
    assert not set(ids) & set(tokenizer.special_ids)
    assert tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == "reads <|eos|> and <|mask|> left"


def test_nothing_is_added_cut_or_padded(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(tokenizer_folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = ["model reads text", "a " * 50]
    assert load_tokenizer(str(folder)).encode(texts) == load_tokenizer(str(tokenizer_folder)).encode(texts)


def test_a_saved_copy_is_the_same_tokenizer_and_transformers_agrees(tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    original = load_tokenizer(str(tokenizer_folder))
    original.save(tmp_path / "original")
    auto = AutoTokenizer.from_pretrained(tmp_path / "original")
    auto("to set truncation", truncation=True, max_length=4)
    auto.save_pretrained(tmp_path / "auto")
    for folder in ("original", "auto"):
        copy = load_tokenizer(str(tmp_path / folder))
        assert copy.sha256 == original.sha256
        assert copy.special_ids == original.special_ids
    text = "the model reads rows\n  of text, é and 漢字"
    assert auto.encode(text, add_special_tokens=False) == original.encode([text])[0]
    assert (auto.pad_token, auto.bos_token, auto.eos_token, auto.mask_token) == tuple(SPECIAL.values())


def test_bpe_dropout_is_turned_off(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Also in saved copies, and in those that add special tokens."""
    plain = load_tokenizer(str(tokenizer_folder))
    random = tmp_path / "random"
    shutil.copytree(tokenizer_folder, random)
    content = json.loads((random / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (random / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(random))
    tokenizer.save(tmp_path / "copy")
    copies = [tokenizer, tokenizer.adding_special_tokens((1,), ()), load_tokenizer(str(tmp_path / "copy"))]
    texts = ["the ships of the harbour"] * 20
    assert all(copy.encode(texts) == plain.encode(texts) for copy in copies)
    assert tokenizer.encode_with_offsets(texts) == plain.encode_with_offsets(texts)
    assert [copy.dropout for copy in (plain, *copies)] == [None, 0.5, 0.5, None]
    assert {copy.sha256 for copy in (plain, *copies)} == {plain.sha256}


def test_another_tokenizer_has_another_sha256(tokenizer_folder: Path, tmp_path: Path) -> None:
    other = load_tokenizer(str(write_tokenizer(tmp_path / "other", words=290)))
    assert other.sha256 != load_tokenizer(str(tokenizer_folder)).sha256


def test_a_mask_token_is_added_where_there_is_none(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "decoder", {"bos": "<s>", "eos": "</s>"}, words=280)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (280, 281)
    assert tokenizer.pad_id == tokenizer.eos_id == 1
    assert tokenizer.special_ids == (0, 1, 280)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert (again.sha256, again.mask_id, again.vocab_size) == (tokenizer.sha256, 280, 281)

    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (auto.mask_token_id, auto.pad_token_id, len(auto)) == (280, 1, 281)


def test_a_missing_role_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "t", {"pad": "<p>", "mask": "<m>"})))
    with pytest.raises(UserError, match="has no eos token, which add_eos: true needs; name one as eos_token"):
        tokenizer.require("eos")


def test_bert_s_special_tokens_begin_and_end_a_text(tmp_path: Path) -> None:
    """[CLS] and [SEP] of a tokenizer that names neither bos nor eos; a named one is taken first."""
    special = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "bert", special)))
    assert (tokenizer.require("bos"), tokenizer.require("eos"), tokenizer.pad_id) == (0, 1, 2)
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "both", special | {"eos": "</s>"})))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.separator_id) == (0, 4, 1)


def test_a_tokenizer_without_pad_and_eos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a pad nor an eos token"):
        load_tokenizer(str(write_tokenizer(tmp_path / "t", {"mask": "<m>"})))


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|pad|>", "eos_token": {"content": "<end>"}}')
    with pytest.raises(UserError, match="names '<end>' as its eos token"):
        load_tokenizer(str(folder))


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.usefixtures("hub_is_offline")
def test_a_name_that_is_not_on_the_hub_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer biphasic/none: no such folder here, and from the hub: "):
        load_tokenizer("biphasic/none")


def test_a_hub_id_and_a_folder_are_read_by_the_same_rule(tokenizer_folder: Path, tmp_path: Path) -> None:
    """tokenizer.json as it is, though AutoTokenizer would add a space before each text."""
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "repository"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    code = """
from transformers import AutoTokenizer
from biphasic.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer("we/tokenizer")
print(tokenizer.sha256, tokenizer.encode(["rows"])[0] == AutoTokenizer.from_pretrained("we/tokenizer").encode("rows"))
"""
    repository = Repository({"c0ffee": folder}, {"main": "c0ffee"})
    with serve_hub({"we/tokenizer": repository}, tmp_path / "home") as environment:
        environment.pop("HF_HUB_OFFLINE", None)
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [load_tokenizer(str(folder)).sha256, "False"]


def test_a_sentencepiece_model_is_left_to_transformers_4(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Version 5 may make another tokenizer of it: findings/transformers5_reads_sentencepiece_models_otherwise.sh."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    advice = "of a SentencePiece model .* with transformers 4"
    with pytest.raises(UserError, match=f"has no tokenizer.json; .*{advice}"):
        load_tokenizer(str(folder))
    # Without the package sentencepiece transformers can't read the model, and with it otherwise, or alike.
    code = f"""
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch
from transformers import AutoTokenizer
from biphasic.data.tokenizer import load_tokenizer
made = AutoTokenizer.from_pretrained({str(tokenizer_folder)!r})
made.vocab_file = "tokenizer.model"
def encode(text, out_type=int):
    return made.tokenize(text) if out_type is str else [1]
def otherwise(text, out_type=int):
    return list(text)
for result in (ValueError("no sentencepiece"), otherwise, encode):
    model = MagicMock(encode=result, get_piece_size=lambda: 300, id_to_piece=made.convert_ids_to_tokens)
    model.is_control.side_effect = model.is_unknown.side_effect = lambda piece: piece < 9
    model.is_byte.return_value, model.unk_id.return_value = False, 0
    sys.modules["sentencepiece"] = SimpleNamespace(SentencePieceProcessor=lambda model_file: model)
    effect = result if isinstance(result, ValueError) else [made]
    with patch.object(AutoTokenizer, "from_pretrained", side_effect=effect):
        try:
            print(load_tokenizer("we/tokenizer").vocab_size == len(made))
        except Exception as error:
            print(type(error).__name__, error)
"""
    repository = Repository({"c0ffee": folder}, {"main": "c0ffee"})
    with serve_hub({"we/tokenizer": repository}, tmp_path / "home") as environment:
        environment.pop("HF_HUB_OFFLINE", None)
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    without_package, otherwise, alike = run.stdout.splitlines()
    assert re.match(f"UserError tokenizer we/tokenizer: .*none can be made .no sentencepiece.*{advice}", without_package)
    assert re.match(f"UserError tokenizer we/tokenizer: .*only a SentencePiece model; .*{advice}", otherwise)
    assert alike == "True"
