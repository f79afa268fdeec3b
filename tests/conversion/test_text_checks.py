"""Warnings about the text: names of special tokens, text that the tokenizer doesn't know, BOS, and another encoding."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from biphasic.commands import main
from biphasic.config.convert import ConvertConfig
from biphasic.config.load import dump
from biphasic.conversion.convert import convert
from biphasic.conversion.tokenizer_checks import (
    TextChecks,
    merge_checks,
    text_warnings,
    tokenizer_remarks,
)
from biphasic.data.same_encoding import encoding_difference
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.texts import VERSE, sentences

Make = Callable[..., ConvertConfig]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))


def save(tokenizer: Tokenizer, folder: Path, **settings: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": name for role, name in NAMES.items()}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return str(folder)


def of_words(folder: Path, words: str = VERSE, **settings: Any) -> str:
    """A tokenizer of lower-case words and single letters, as BERT's."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = dict.fromkeys([*SPECIAL, *letters, *(f"##{each}" for each in letters), *words.lower().split()])
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    return save(tokenizer, folder, **settings)


def of_letters(folder: Path) -> str:
    """BPE of characters without an unknown token, which leaves out all others."""
    ids = {token: number for number, token in enumerate([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz."])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return save(tokenizer, folder)


def checked(tokenizer: str, *texts: str) -> dict[str, Any]:
    loaded, parts = load_tokenizer(tokenizer), []
    for text in texts:
        checks = TextChecks(loaded)
        checks.add(text, np.array(loaded.encode([text])[0]))
        parts.append(checks.record())
    return merge_checks(parts)


def test_names_of_special_tokens_are_counted(config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = sentences(30)
    for number, record in enumerate(records):
        record["text"] += " <|eos|> more" * (number % 3) + (" <|pad|>" if number == 7 else "")
    config = config_for(records)
    expected = "names of special tokens, which are encoded as plain text: <|eos|> (30), <|pad|> (1); if one separates"
    assert convert(config)["checks"]["special_names"] == {"<|eos|>": 30, "<|pad|>": 1}
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config))
    assert main(["convert", str(path), "--plan"]) == 0
    assert "WARNING" in (plan := " ".join(capsys.readouterr().out.split())) and expected in plan
    assert main(["convert", str(path), f"output={tmp_path / 'again'}"]) == 0
    assert f"WARNING: the text holds {expected}" in capsys.readouterr().out
    separated = ["source.separator=<|eos|>", f"output={tmp_path / 'separated'}"]
    assert main(["convert", str(path), *separated]) == 0
    record = json.loads((tmp_path / "separated" / "conversion.json").read_text())
    assert record["checks"]["special_names"] == {"<|pad|>": 1}
    assert record["splits"]["train"]["documents"] == 30 + 30  # each name is followed by text


def test_names_that_only_the_settings_have_are_counted(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "chat"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"300": {"content": "<|user|>", **TOKEN, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    checks = checked(str(folder), "<|user|> reads <|use|>", "<|eos|> rows <|user|>")
    assert checks["special_names"] == {"<|user|>": 2, "<|eos|>": 1}


def test_text_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    words = of_words(tmp_path / "words", "the reader")
    assert text_warnings(checked(words, "The reader the")) == []
    checks = checked(words, "the reader, 漢字 漢 the", "漢 漢")
    assert (checks["tokens"], checks["unknown_tokens"]) == (9, 6)  # BERT's pre-tokenizer divides 漢字
    assert text_warnings(checks) == ["67% of the tokens stand for text that is unknown to the tokenizer"]


def test_text_that_the_tokenizer_leaves_out(config_for: Make, tmp_path: Path, tokenizer_folder: Path) -> None:
    letters = of_letters(tmp_path / "letters")
    config = config_for(sentences(3))
    [remark] = tokenizer_remarks(config, load_tokenizer(letters))
    assert "has no unknown token, and leaves out characters that are not in its vocabulary" in remark
    assert tokenizer_remarks(config, load_tokenizer(str(tokenizer_folder))) == []  # of bytes
    assert text_warnings(checked(str(tokenizer_folder), "Größe 漢字 \x00")) == []
    # The library says that the "b" of "aöb" is where the "ö" is: labels of words would be shifted.
    with pytest.raises(UserError, match="leaves out text that is not in its vocabulary"):
        load_tokenizer(letters).encode_with_offsets(["aöb"])
    assert load_tokenizer(str(tokenizer_folder)).encode_with_offsets(["ab"])


def test_unknown_text_is_warned_of(config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = sentences(20)
    for record in records[::2]:
        record["text"] = "漢字 " * 20
    config = config_for(records, tokenizer=of_words(tmp_path / "words"), add_eos=True)
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config))
    for arguments in (["--plan"], []):
        assert main(["convert", str(path), *arguments]) == 0
        assert "of the tokens stand for text that is unknown to the tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["post-processor", "add_bos_token"])
def test_a_tokenizer_that_puts_bos_before_each_text(
    setting: str, config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sentences(20))
    folder = Path(shutil.copytree(config.tokenizer, tmp_path / "with-bos"))
    if setting == "add_bos_token":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
        tokenizer.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(str(folder)).puts_bos and not load_tokenizer(config.tokenizer).puts_bos
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(sentences(20), tokenizer=str(folder))))
    for arguments in (["--plan"], []):
        for overrides, is_said in (([], True), (["add_bos=true", f"output={tmp_path / 'bos'}"], False)):
            assert main(["convert", str(path), *arguments, *overrides]) == 0
            said = "puts <|bos|> (BOS) before each text, and the rows have none" in capsys.readouterr().out
            assert said == is_said


def test_a_tokenizer_that_autotokenizer_reads_otherwise(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`do_lower_case: false` beside a tokenizer.json that lowers case. What AutoTokenizer saves is accepted."""
    from transformers import AutoTokenizer

    folder = of_words(tmp_path / "bert", tokenizer_class="BertTokenizer", do_lower_case=False)
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config := config_for([{"id": "1", "text": "The Reader"}] * 5, tokenizer=folder)))
    message = r"tokenizer .*/bert: AutoTokenizer \(BertTokenizer\), .* of 'The Reader' it makes .* tokenizer\.json .*"
    with pytest.raises(UserError, match=message):
        convert(config)
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(path), "--plan"]) == 2
    assert "PROBLEM" in (plan := capsys.readouterr().out) and "AutoTokenizer (BertTokenizer)" in plan
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    convert(config_for([{"id": "1", "text": "The Reader"}] * 5, tokenizer=str(tmp_path / "saved")))


TOKEN = {"special": False, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)}


@pytest.mark.parametrize(
    ("settings", "text", "agrees"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}, "The Reader", True),
        ({"tokenizer_class": "GPT2Tokenizer"}, "the reader", True),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "the reader", False),
        ({"added_tokens_decoder": {"300": {"content": "<ref>", **TOKEN}}}, "the <ref> reader", False),
        ({"added_tokens_decoder": {"300": {"content": "<ref>", **TOKEN}}}, "the reader", True),
        ({"tokenizer_class": "NoSuchTokenizer"}, "the reader", True),
    ],
)
def test_settings_that_change_what_autotokenizer_reads(
    settings: dict[str, Any], text: str, agrees: bool, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "changed"))
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, **settings}))
    tokenizer = load_tokenizer(str(folder))
    difference = encoding_difference(tokenizer, ["rows", text], add_special_tokens=False)
    assert (difference is None) == agrees
    assert agrees or re.search(r"AutoTokenizer .*, with which a model's users encode", str(difference))
