"""The bytes of text that tokens stand for, with small tokenizers of each kind, trained here."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from biphasic.data.tokenizer import TokenTexts, load_tokenizer
from helpers.texts import KINDS, write_kind, write_tokenizer

TEXTS = ["the model reads naïve rows", "漢字 and é", "two  spaces\nand a line"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_a_text_s_tokens_are_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_kind(tmp_path, kind)))
    texts = TokenTexts(tokenizer)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        joined = b"".join(texts.texts[token] for token in ids)
        if kind == "byte-level":
            assert joined == text.encode()
        elif kind == "metaspace":
            assert joined == f" {text}".encode()  # which the tokenizer adds
        elif text == TEXTS[0]:  # it has no words but those of the tokenizer's text, and single spaces
            assert joined == f" {text}".encode()


def test_runs_of_spaces_that_are_added_tokens(tmp_path: Path) -> None:
    """Gemma's form: runs of spaces are tokens of the model, and added ones; other characters than these are bytes."""
    words = ["<pad>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "a", "日", "b▁b"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    model = models.BPE({word: number for number, word in enumerate(words)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("▁▁", "▁▁▁▁", "[b▁]")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    texts, text = TokenTexts(loaded), "a       日\n  本 น้ำ"
    [ids] = loaded.encode([text])
    assert [loaded.tokenizer.id_to_token(token) for token in ids[:4]] == ["a", "▁▁▁▁", "▁▁", "▁"]
    assert b"".join(texts.texts[token] for token in ids) == text.encode()
    [added] = loaded.encode(["[b▁]"])
    assert [texts.texts[token] for token in added] == ["[b▁]".encode()]  # a name of its own, not the model's


def test_special_tokens_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    assert TokenTexts(tokenizer).texts[:4] == [b""] * 4
    assert all(TokenTexts(tokenizer).texts[4:])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_token(kind: str, tmp_path: Path) -> None:
    texts = TokenTexts(load_tokenizer(str(write_kind(tmp_path, kind))))
    for text in (b" modelreads", b" rowsattention"):
        pieces = texts.split(text)
        assert len(pieces) > 1 and b"".join(texts.texts[piece] for piece in pieces) == text
    assert [texts.texts[piece] for piece in texts.split(b" model")] == [b" model"]
    # A part of a character has pieces only where bytes are tokens.
    assert [texts.texts[piece] for piece in texts.split("漢".encode()[:1])] == [b"\xe6"] * (kind == "byte-level")
    assert texts.split(b"") == []
