"""Compare how tokenizer.json and transformers' AutoTokenizer encode a text: with the latter, a model's users do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError, first_line
from biphasic.storage import is_folder, is_remote

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that read tokenizer.json as it is. Others may replace its normalizer and pre-tokenizer."""
_COMPARED_CHARACTERS = 400_000
_TEXT_CHARACTERS = 80


def require_same_encoding(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Raise a UserError if AutoTokenizer encodes a part of the texts otherwise than `tokenizer`; it shows the first.

    Names of special tokens are plain text in both. Nothing is compared where AutoTokenizer can only read tokenizer.json as
    it is, or can't load the tokenizer at all.
    """
    if _is_plain(tokenizer) or (auto := _load(tokenizer)) is None:
        return
    compared = 0
    for text in texts:
        for start in range(0, len(text), _TEXT_CHARACTERS):
            part = text[start : start + _TEXT_CHARACTERS]
            [ours], theirs = tokenizer.encode([part]), _encode(auto, part)
            if ours != theirs:
                raise UserError(
                    f"tokenizer {tokenizer.source}: AutoTokenizer ({type(auto).__name__}), with which a model's users "
                    f"encode, does not do what its tokenizer.json says: of {part!r} it makes {_shown(auto, theirs)}, and "
                    f"tokenizer.json {_shown(tokenizer.tokenizer, ours)}; name a copy on which both agree: the folder of "
                    "AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER), or one whose tokenizer_config.json has "
                    "tokenizer_class: PreTrainedTokenizerFast and no settings but the names of special tokens"
                )
            compared += len(part)
            if compared > _COMPARED_CHARACTERS:
                return


def _is_plain(tokenizer: Tokenizer) -> bool:
    """Return whether AutoTokenizer certainly reads tokenizer.json as it is."""
    settings, place = tokenizer.settings, tokenizer.source
    listed = (settings.get("added_tokens_decoder") or {}).values()
    names = {token["content"] if isinstance(token, dict) else str(token) for token in listed}
    others = names - {token.content for token in tokenizer.tokenizer.get_added_tokens_decoder().values()}
    has_model = not is_remote(place) and (not is_folder(place) or Path(place, "config.json").is_file())
    return settings.get("tokenizer_class") in _PLAIN_CLASSES and not others and not has_model


def _load(tokenizer: Tokenizer) -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        place = tokenizer.source
        if is_remote(place):
            tokenizer.save(Path(folder))
            place = folder
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        except Exception as error:  # of a class without its package, or of the repository's own code
            print(
                f"tokenizer {tokenizer.source}: not compared with AutoTokenizer, which can't load it ({first_line(error)})"
            )
            return None


def _encode(auto: Any, text: str) -> list[int]:
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:  # one without the tokenizers library
        return auto.encode(text, add_special_tokens=False, split_special_tokens=True)
    backend.encode_special_tokens = True
    backend.no_truncation()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return backend.encode(text, add_special_tokens=False).ids


def _shown(tokenizer: Any, ids: list[int]) -> str:
    name = getattr(tokenizer, "id_to_token", None) or tokenizer.convert_ids_to_tokens
    return json.dumps([name(token) for token in ids], ensure_ascii=False)
