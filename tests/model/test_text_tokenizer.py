"""An encoder's texts are tokenized as its files say, up to the tokens that it has positions for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoTokenizer

from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.export.finetuned import export_finetuned
from biphasic.model.encoder import load_encoder
from helpers.cls_tokenizers import AROUND, SPECIAL
from helpers.families import bert_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 65, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 48, "max_position_embeddings": 34, "type_vocab_size": 1}  # fmt: skip


def write_encoder(folder: Path, family: str, **settings: Any) -> Path:
    """Write a small encoder whose padding is token 0, with settings of its tokenizer."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(family, **SIZES, pad_token_id=0)).save_pretrained(folder)
    bert_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(("family", "positions"), [("bert", 34), ("roberta", 33), ("mpnet", 32)])
@pytest.mark.parametrize(
    ("max_seq_length", "model_max_length"), [(34, 34), (40, 20), (None, 33), (None, 34), (None, int(1e30)), (20, 34)]
)
def test_texts_are_cut_where_positions_end(
    family: str,
    positions: int,
    max_seq_length: int | None,
    model_max_length: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """RoBERTa's and MPNet's count includes reserved ones, which files often don't subtract."""
    folder = write_encoder(tmp_path / family, family, model_max_length=model_max_length)
    if max_seq_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    encoder = load_encoder(str(folder))
    [ids] = encoder.tokenize(["w1 " * 50])
    assert len(ids) == min(max_seq_length or model_max_length, positions)
    assert encoder.embed([ids]).isfinite().all()
    is_named = f"texts are truncated to the {positions} tokens that it has positions for" in caplog.text
    assert is_named == ((max_seq_length or 0) > positions)


def test_texts_of_a_model_without_a_table_of_positions_may_be_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As DeBERTa v3, whose positions are relative."""
    settings = {"position_biased_input": False, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model("deberta-v2", **SIZES, **settings, pad_token_id=0)).save_pretrained(tmp_path)
    bert_tokenizer(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60}))
    encoder = load_encoder(str(tmp_path))
    [ids] = encoder.tokenize(["w1 " * 80])
    assert len(ids) == 60 and encoder.embed([ids]).isfinite().all()
    assert "texts are truncated" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, ""),
        ({"do_lower_case": False}, "it makes"),
        ({"strip_accents": False}, "Éc"),
        ({"tokenize_chinese_chars": False}, "你"),
        ({"post_processor": None}, '"[CLS]"'),
    ],
)
def test_a_tokenizer_that_autotokenizer_reads_otherwise_is_named(
    settings: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' classes make their own tokenizer from settings, and sentence-transformers uses that."""
    folder = write_encoder(tmp_path / "bert", "bert", tokenizer_class="BertTokenizer", **settings)
    characters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ecoleheqikbrwnfx你好世界"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(characters)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    if "post_processor" not in settings:
        tokenizer.post_processor = AROUND
    tokenizer.save(str(folder / "tokenizer.json"))
    load_encoder(str(folder))
    message = "AutoTokenizer (BertTokenizer), with which a model's users encode, does not do what its tokenizer.json says"
    assert (message in caplog.text) == bool(named) and named in caplog.text


@pytest.mark.parametrize("is_in_settings", [True, False])
def test_a_tokenizer_that_cuts_the_beginning_is_named_and_its_export_cuts_the_end(
    is_in_settings: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"truncation_side": "left"} if is_in_settings else {}
    folder, out = write_encoder(tmp_path / "bert", "bert", model_max_length=6, **settings), tmp_path / "out"
    if not is_in_settings:
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.enable_truncation(6, direction="left")
        tokenizer.save(file)
    assert AutoTokenizer.from_pretrained(folder).truncation_side == "left"
    encoder = load_encoder(str(folder))
    assert "long texts are cut at their end, although its tokenizer has truncation_side: left" in caplog.text
    export_finetuned(encoder, torch.nn.Identity(), None, out, lambda **_: "", prompts={}, max_length=6)
    text = "w1 w2 w3 w4 w5 w6"
    assert AutoTokenizer.from_pretrained(out)(text, truncation=True).input_ids == encoder.tokenize([text])[0]
    caplog.clear()
    load_encoder(str(out))
    assert not caplog.text


def test_a_model_s_lowercasing_holds_for_every_task_and_in_its_export(tmp_path: Path) -> None:
    """`İ` becomes two characters in lower case; the characters of words and answers are the text's own."""
    folder, out = write_encoder(tmp_path / "bert", "bert"), tmp_path / "out"
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    encoder = load_encoder(str(folder))
    assert encoder.tokenize(["İ W3 w4"]) == [[2, 1, 8, 9, 3]]
    assert encoder.tokenizer.sha256 != load_tokenizer(str(folder)).sha256, "cached tokens are another tokenizer's"
    [(ids, offsets)] = encoder.text_tokenizer.tokenize_with_offsets(["İ W3 w4"])
    assert (ids, offsets) == ([1, 8, 9], [(0, 1), (2, 4), (5, 7)])
    export_finetuned(encoder, torch.nn.Identity(), None, out, lambda **_: "", prompts={}, max_length=34)
    assert AutoTokenizer.from_pretrained(out)("İ W3 w4").input_ids == [2, 1, 8, 9, 3]
    again = load_encoder(str(out)).text_tokenizer
    assert again.settings.lowercase and [*again.tokenize_with_offsets(["W3"])] == [([8], [(0, 2)])]


@pytest.mark.parametrize("model", [models.WordLevel, models.BPE])  # of an unknown letter: an error, nothing
def test_special_tokens_of_a_vocabulary_without_the_letter_a(model: Any, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *"CGTN"])}
    tokenizer = Tokenizer(model(vocabulary, **({"merges": []} if model is models.BPE else {})))
    tokenizer.pre_tokenizer, tokenizer.post_processor = pre_tokenizers.Split("", "isolated"), AROUND
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = load_encoder(str(folder))
    assert encoder.tokenize(["GT"]) == [[2, 6, 7, 3]]
    if model is models.WordLevel:
        with pytest.raises(
            UserError, match=r"tokenizer .*bert: can't encode a text \(WordLevel error: Missing \[UNK\] token"
        ):
            encoder.tokenize(["GA"])
