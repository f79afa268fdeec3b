"""gigatoken gives the ids of tokenizers, is refused by name where it can't, and a difference is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from biphasic.data import bulk_encoding
from biphasic.data.bulk_encoding import BulkEncoder, DifferentIdsError, choose_backend
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.texts import sentences, write_kind, write_tokenizer

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's division of a text into words."""
TEXTS = [
    "a text with <|eos|> and <|mask|> in it, and <own> too",
    "  two  spaces\tand\n\n\nlines   ",
    "naïve cafe\u0301 Ελληνικά 日本語のテキスト ไทย 🙂👩‍👩‍👧 don't WE'LL 12345678",
    "",
    "\x00\x7f\u200b\ufeff",
    "x" * 3000,
]


def gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def prefix_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def llama(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])


def nfc_and_own_token(tokenizer: Tokenizer) -> None:
    gpt2(tokenizer)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<own>", normalized=False)])


def trained(folder: Path, build: Callable[[Tokenizer], None]) -> Any:
    write_tokenizer(folder)
    tokenizer = Tokenizer(models.BPE())
    build(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([record["text"] for record in sentences(50)] + TEXTS, trainer)
    # What is put around a text is no part of its ids.
    tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", None, [("<|bos|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("build", [gpt2, prefix_space, llama, nfc_and_own_token])
def test_the_ids_are_those_of_tokenizers(build: Callable[[Tokenizer], None], tmp_path: Path) -> None:
    tokenizer = trained(tmp_path, build)
    encoder = BulkEncoder(tokenizer, "gigatoken")

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=200)), max_size=5))
    def check(texts: list[str]) -> None:
        texts = [text.encode("utf-8", "ignore").decode() for text in texts]
        assert [ids.tolist() for ids in encoder.encode(texts)] == tokenizer.encode(texts)

    check()
    plain = BulkEncoder(tokenizer, "tokenizers").encode(TEXTS)
    assert [ids.tolist() for ids in plain] == tokenizer.encode(TEXTS)
    assert not {0, 1, 2, 3} & {token for ids in plain for token in ids.tolist()}


def test_auto_takes_what_is_faster_and_gives_the_same_ids(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, texts = load_tokenizer(str(tokenizer_folder)), [record["text"] for record in sentences(300)]
    backend, reason = choose_backend(tokenizer, "auto", texts)
    assert (backend, reason.partition("times ")[2]) == (
        "gigatoken",
        "as fast as tokenizers, with the same ids for 300 texts",
    )
    assert choose_backend(tokenizer, "tokenizers", texts)[0] == "tokenizers"
    (tmp_path / "wordpiece").mkdir()
    words = load_tokenizer(str(write_kind(tmp_path / "wordpiece", "wordpiece")))
    backend, reason = choose_backend(words, "auto", texts)
    assert backend == "tokenizers"
    assert "gigatoken can't be used with it" in reason
    with pytest.raises(UserError, match=r"tokenizer_backend: gigatoken: .*WordPiece.*; expected auto or tokenizers"):
        choose_backend(words, "gigatoken", texts)
    monkeypatch.setattr(bulk_encoding.importlib.util, "find_spec", lambda name: None)
    assert choose_backend(tokenizer, "auto", texts) == (
        "tokenizers",
        "gigatoken, which is faster, is not installed: the extra biphasic[fast]",
    )


class Slow:
    """A stand-in for a library that needs more time than tokenizers."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def encode(self, text: str) -> np.ndarray:
        for _ in range(20):
            ids = self.tokenizer.encode([text])[0]
        return np.array(ids, np.uint32)


class Wrong(Slow):
    """A stand-in for a library that drops the last token of texts with a certain word."""

    def encode(self, text: str) -> np.ndarray:
        ids = np.array(self.tokenizer.encode([text])[0], np.uint32)
        return ids[:-1] if "causal" in text else ids


def test_auto_leaves_a_slower_library(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_encoding, "_load", Slow)
    texts = [record["text"] for record in sentences(100)]
    backend, reason = choose_backend(load_tokenizer(str(tokenizer_folder)), "auto", texts)
    assert backend == "tokenizers"
    assert "times its time" in reason


def test_a_difference_names_the_place(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_encoding, "_load", Wrong)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    encoder = BulkEncoder(tokenizer, "gigatoken")
    text = "the model masks causal rows"
    with pytest.raises(DifferentIdsError, match=r"a text of 27 characters differently, from 's': \[\] and \['s'\]"):
        encoder.compare(text, encoder.encode([text])[0])
    assert choose_backend(tokenizer, "auto", [text])[0] == "tokenizers"
    with pytest.raises(UserError, match=r"tokenizer_backend: gigatoken: .*differently"):
        choose_backend(tokenizer, "gigatoken", [text])


def test_the_cache_is_emptied(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    load = bulk_encoding._load
    monkeypatch.setattr(bulk_encoding, "_load", lambda tokenizer: loads.append(1) or load(tokenizer))
    monkeypatch.setattr(bulk_encoding, "_RENEWED_AFTER", 1000)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    encoder, texts = BulkEncoder(tokenizer, "gigatoken"), [record["text"] for record in sentences(40)]
    for text in texts:
        assert encoder.encode([text])[0].tolist() == tokenizer.encode([text])[0]
    assert len(loads) > 2
