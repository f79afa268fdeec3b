"""Compare a tokenizer.json with what transformers makes of its folder."""

import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import first_line
from biphasic.quiet import without_warnings
from biphasic.storage import is_folder, is_remote

_log = logging.getLogger(__name__)
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that read tokenizer.json as it is. Others may replace its normalizer and pre-tokenizer."""
_COMPARED_CHARACTERS, _TEXT_CHARACTERS = 400_000, 80
TELLING_TEXTS = (
    "The quick Brown fox doesn't jump  over 12,345 DOGS in 2026;\tit's (nearly)\r\n\n    3.14 o'clock, x_1!=0. ",
    "École naïve straße ﬁne İstanbul ΟΔΟΣ e\u0301 \uff46\uff55 \u00a0 «Привет, мир» 你好,世界。東京タワー 안녕 مرحبا 👍🏽",
)
"""Texts that tokenizers with other normalizers or pre-tokenizers encode otherwise."""


def encoding_difference(
    tokenizer: Tokenizer, texts: Iterable[str], add_special_tokens: bool, revision: str | None = None
) -> str | None:
    """Return how AutoTokenizer encodes a part of a text otherwise, for a message; None if all are encoded alike.

    Names of special tokens are plain text in both. Nothing is compared where AutoTokenizer can only read tokenizer.json as
    it is, or can't load the tokenizer at all.
    """
    if _is_plain(tokenizer) or (auto := _load(tokenizer, revision)) is None:
        return None
    compared = 0
    for text in texts:
        for start in range(0, len(text), _TEXT_CHARACTERS):
            part = text[start : start + _TEXT_CHARACTERS]
            try:
                ours = tokenizer.tokenizer.encode(part, add_special_tokens=add_special_tokens).ids
                theirs = _encode(auto, part, add_special_tokens)
            except Exception:  # a bare one, of a word that a vocabulary without an unknown token lacks
                continue
            if ours != theirs:
                return (
                    f"tokenizer {tokenizer.source}: AutoTokenizer ({type(auto).__name__}), with which a model's users "
                    f"encode, does not do what its tokenizer.json says: of {part!r} it makes {_shown(auto, theirs)}, and "
                    f"tokenizer.json {_shown(tokenizer.tokenizer, ours)}; name a copy on which both agree: the folder of "
                    "AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER), or one whose tokenizer_config.json has "
                    "tokenizer_class: PreTrainedTokenizerFast and no settings but the names of special tokens"
                )
            compared += len(part)
            if compared > _COMPARED_CHARACTERS:
                return None
    return None


def listed_names(tokenizer: Tokenizer, kind: str | None = None) -> set[str]:
    """Return the added tokens that tokenizer_config.json lists (`special` ones); tokenizer.json may lack some."""
    listed = (tokenizer.settings.get("added_tokens_decoder") or {}).values()
    return {token["content"] for token in listed if isinstance(token, dict) and (kind is None or token.get(kind))}


def _is_plain(tokenizer: Tokenizer) -> bool:
    """Return whether AutoTokenizer certainly reads tokenizer.json as it is."""
    added, place = tokenizer.tokenizer.get_added_tokens_decoder().values(), tokenizer.source
    others = listed_names(tokenizer) - {token.content for token in added}
    has_model = not is_remote(place) and (not is_folder(place) or Path(place, "config.json").is_file())
    return tokenizer.settings.get("tokenizer_class") in _PLAIN_CLASSES and not others and not has_model


def _load(tokenizer: Tokenizer, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, without_warnings():
        place = tokenizer.source
        if is_remote(place):
            tokenizer.save(Path(folder))
            place = folder
        try:
            return AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
        except Exception as error:  # of a class without its package, or of the repository's own code
            message = "tokenizer %s: not compared with AutoTokenizer, which can't load it (%s)"
            _log.warning(message, tokenizer.source, first_line(error))
            return None


def _encode(auto: Any, text: str, add_special_tokens: bool) -> list[int]:
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:  # one without the tokenizers library
        return auto.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=True)
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def _shown(tokenizer: Any, ids: list[int]) -> str:
    name = getattr(tokenizer, "id_to_token", None) or tokenizer.convert_ids_to_tokens
    return json.dumps([name(token) for token in ids], ensure_ascii=False)
