"""The command that trains a tokenizer: what it reads, its special tokens, and what it refuses."""

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from biphasic.commands import main
from biphasic.data.bulk_encoding import BulkEncoder
from biphasic.data.packing import document_number, validation_end
from biphasic.data.tokenizer import load_tokenizer
from helpers.texts import sentences, write_parquet


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A conversion's YAML, with two files and a validation split."""
    records = sentences(200)
    (tmp_path / "text").mkdir()
    write_parquet(tmp_path / "text" / "a.parquet", records[:100])
    write_parquet(tmp_path / "text" / "b.parquet", records[100:])
    keys = {
        "job": "convert",
        "source": {"kind": "files", "paths": [str(tmp_path / "text")]},
        "tokenizer": str(tmp_path / "tokenizer"),
        "output": str(tmp_path / "out"),
        "validation_fraction": 0.3,
        "sequence_length": 64,
    }
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def vocabulary(folder: Path) -> dict[str, int]:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]


def test_training_and_the_next_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", str(file), f"source.paths=[{tmp_path / 'text'}]", "--size", "320"]) == 0
    output = capsys.readouterr().out
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    training = [r for r in sentences(200) if document_number(r["id"]) >= validation_end(0.3)]
    assert tokenizer.vocab_size == 320 and f"320 tokens, trained on {len(training)} documents" in output
    assert tokenizer.role_ids == {"pad": 0, "bos": 1, "eos": 2, "mask": 3}
    text = "Grüße, 世界 \x00\n"
    [ids] = tokenizer.encode([text])
    assert tokenizer.tokenizer.decode(ids) == text
    words = shlex.split(output.splitlines()[-1])
    assert words[:2] == ["next:", "biphasic"] and main(words[2:]) == 0


def test_special_tokens_and_a_folder_of_its_own(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "own"
    arguments = ["--special", "mask=[MASK]", "--special", "unk=[UNK]", "--add", "<ref>", "--out", str(out)]
    assert main(["tokenizer", str(file), "--size", "100000", *arguments]) == 0
    output = capsys.readouterr().out
    assert "instead of 100,000" in output and f"tokenizer={out}" in output.splitlines()[-1]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.mask_token, tokenizer.unk_token, tokenizer.pad_token) == ("[MASK]", "[UNK]", "<|pad|>")
    assert tokenizer.tokenize("a<ref>b") == ["a", "<ref>", "b"]
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|bos|>", "<|eos|>", "[MASK]", "[UNK]", "<ref>"]) == [*range(6)]


@pytest.mark.parametrize("token", ["<ref>", "the", "<a b>", "[東京]"])
def test_an_added_token_is_an_ordinary_one(
    token: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversion, AutoTokenizer and gigatoken make one token of it, it can be masked, and nobody is warned of its name."""
    assert main(["tokenizer", str(file), "--size", "400", "--add", token]) == 0
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    text = f"{token}In {token}{token} <|eos|>"
    [ids] = tokenizer.encode([text])
    assert ids.count(4) == 3 and 4 not in tokenizer.special_ids and tokenizer.tokenizer.id_to_token(4) == token
    auto = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert auto.encode(text, split_special_tokens=False)[:-1] == ids[: len(auto.encode(text)) - 1]
    assert auto.decode(ids) == tokenizer.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert BulkEncoder(tokenizer, "gigatoken").encode([text])[0].tolist() == ids
    (tmp_path / "marked.jsonl").write_text("".join(f'{{"id": "{n}", "text": "{n}{token}"}}\n' for n in range(9)))
    capsys.readouterr()
    assert main(["convert", str(file), f"source.paths=[{tmp_path / 'marked.jsonl'}]"]) == 0
    assert "special tokens" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("keeps_marks", "text", "tokens"),
    [
        # Vowel signs and conjuncts (Hindi), short vowels (Arabic), accents as characters of their own (NFD).
        (True, "किताब में हिन्दी क्षेत्र", ["किताब", " में", " हिन्दी", " क्षेत्र"]),
        (True, "مُحَمَّدٌ كَتَبَ", ["مُحَمَّدٌ", " كَتَبَ"]),
        (True, "cafe\u0301 de\u0301ja\u0300", ["cafe\u0301", " de\u0301ja\u0300"]),
        # Few marks or no spaces: GPT-2's words, as in earlier versions.
        (False, "น้ำดื่ม ที่นี่", ["น", "้", "ำด", "ื่", "ม", " ท", "ี่", "น", "ี่"]),
        (False, "東京は 日本の (首都)", ["東京は", " 日本の", " (", "首都", ")"]),
        (False, "don't 12345", ["don", "'t", " 12345"]),
    ],
)
def test_words_keep_their_marks(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keeps_marks: bool, text: str, tokens: list[str]
) -> None:
    """With enough merges each word is a token, which shows what the words are."""
    write_parquet(tmp_path / "text" / "a.parquet", [{"id": str(number), "text": text} for number in range(50)])
    arguments = [f"source.paths=[{tmp_path / 'text/a.parquet'}]", "--size", "2000", "--out", str(tmp_path / "own")]
    assert main(["tokenizer", str(file), *arguments]) == 0
    assert ("combining marks: words are divided by GPT-4o's pattern" in capsys.readouterr().out) == keeps_marks
    tokenizer = load_tokenizer(str(tmp_path / "own"))
    [ids] = tokenizer.encode([text])
    assert [tokenizer.tokenizer.decode([token]) for token in ids] == tokens
    assert BulkEncoder(tokenizer, "gigatoken").encode([text])[0].tolist() == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "own")(text)["input_ids"] == ids


def test_the_limit_takes_text_from_every_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "text" / "b.parquet", [{"id": f"z{n}", "text": "zweite zweite"} for n in range(3000)])
    assert main(["tokenizer", str(file), "--size", "300", "--max-text", "8kb"]) == 0
    read = capsys.readouterr().out.partition(" of text")[0].rpartition(", ")[2]
    assert 6 < float(read.removesuffix(" KB")) <= 8
    words = {word.strip("Ġ") for word in vocabulary(tmp_path / "tokenizer")}
    assert "zw" in words or "zwei" in words or "zweite" in words


def test_the_limit_with_files_of_one_document(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is longer than its file's share of the limit."""
    (tmp_path / "notes").mkdir()
    for number in range(10):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"{number} " * 500)
    arguments = ["tokenizer", str(file), f"source.paths=[{tmp_path / 'notes'}]", "--size", "300"]
    assert main([*arguments, "validation_fraction=0", "--max-text", "9kb"]) == 0
    assert "trained on 9 documents, 9 KB" in capsys.readouterr().out
    assert main([*arguments, "--force", "--max-text", "0.9kb"]) == 2
    assert "(the first of each file may be longer than --max-text, 900 bytes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "100"], "--size: expected at least 260 (256 bytes and 4 special tokens); got 100"),
        (["--special", "masked=x"], "--special: expected ROLE=TOKEN with a role of pad, bos, eos, mask"),
        (["--special", "mask=<|eos|>"], "special tokens: must be distinct"),
        (["--add", "<é>"], "--add: expected a text such as <code>; '<é>' would be decoded to '<\ufffd>'"),
        (["--add", ""], "--add: expected a text such as <code>; '' would"),
        (["--max-text", "much"], "--max-text: expected a size such as 200gb; got 'much'"),
        (["tokenizer=EuroBERT/EuroBERT-210m"], "is not a local folder; set the folder to write with --out"),
        (["--out", "text"], "text: exists and is not a tokenizer folder"),
        (["--out", "text/a.parquet/x"], "text/a.parquet/x: can't be written ("),
        (["--out", "s3://bucket/x"], "error: argument --out: expected a local path; got 's3://bucket/x'"),
        (["source.paths=[absent]"], "source absent: there is no such file"),
        (["text_column=body"], "has no column 'body' (it has: id, text)"),
        (["tokenizer="], "command line: tokenizer: expected a value; got nothing (tokenizer=null sets null)"),
    ],
)
def test_refused(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["tokenizer", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (file.parent / "tokenizer").exists()


def test_an_earlier_tokenizer_is_kept(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", str(file), "--size", "280"]) == 0
    assert main(["tokenizer", str(file), "--size", "300"]) == 2
    assert "already holds a tokenizer" in capsys.readouterr().err
    assert main(["tokenizer", str(file), "--size", "300", "--force"]) == 0
    assert load_tokenizer(str(tmp_path / "tokenizer")).vocab_size == 300


def test_a_full_disk(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", save)
    assert main(["tokenizer", str(file), "--size", "280"]) == 2
    expected = f"{tmp_path / 'tokenizer'}: can't be written (No space left on device (os error 28))"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "tokenizer").exists()


def test_a_mount_point_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "tokenizer")
    assert main(["tokenizer", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'tokenizer'}: is a mount point, ")


def test_an_empty_file_is_named(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text" / "x.jsonl").touch()
    assert main(["tokenizer", str(file), "--size", "300"]) == 2
    fault = f"source {tmp_path / 'text' / 'x.jsonl'}: is empty (0 bytes); restore the file"
    assert capsys.readouterr().err.startswith(fault)
    assert main(["tokenizer", str(file), "--size", "300", "on_bad_file=skip"]) == 0


def test_a_damaged_file_is_read_up_to_its_damage(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the YAML says so, as the conversion does; its plan, too."""
    words = " ".join(record["text"] for record in sentences(30_000))
    size = len(words) // 300
    records = [{"id": f"c{n}", "text": words[n * size : (n + 1) * size]} for n in range(300)]
    content = gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode())
    damaged = tmp_path / "text" / "c.jsonl.gz"
    damaged.write_bytes(content[: len(content) * 2 // 3])
    assert main(["tokenizer", str(file), "--size", "300"]) == 2
    assert "c.jsonl.gz: is damaged after line" in capsys.readouterr().err
    assert main(["tokenizer", str(file), "--size", "300", "on_bad_file=skip"]) == 0
    arguments = [f"source.paths=[{damaged}]", "on_bad_file=skip", "--plan"]
    assert main(["convert", str(file), *arguments]) == 0
    assert "1 files" in capsys.readouterr().out
    assert main(["convert", str(file), *arguments, "on_bad_file=stop"]) == 2
    assert "c.jsonl.gz: is damaged after line" in capsys.readouterr().out


def test_paths_of_the_home_folder(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that doesn't exist yet is no hub id."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    overrides = ["source.paths=[~/text]", "output=~/data/mine"]
    assert main(["tokenizer", str(file), *overrides, "tokenizer=~/toks/one", "--size", "300"]) == 0
    assert main(["tokenizer", str(file), *overrides, "tokenizer=data/two", "--size", "300"]) == 0
    assert main(["convert", str(file), *overrides, "tokenizer=~/toks/one", "cluster.workers=1"]) == 0
    assert (tmp_path / "toks/one/tokenizer.json").is_file() and (tmp_path / "data/two/tokenizer.json").is_file()
    record = json.loads((tmp_path / "data" / "mine" / "conversion.json").read_text())
    assert record["config"]["output"] == str(tmp_path / "data" / "mine")
    assert not (tmp_path / "~").exists()
