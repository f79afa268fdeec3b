"""The bytes of text that tokens stand for, with small tokenizers of each kind, trained here."""

from __future__ import annotations

from pathlib import Path

import pytest

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
