"""What a conversion checks of its tokenizer: that transformers encodes alike, and names and text that it doesn't know."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.convert import ConvertConfig
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError, first_line
from biphasic.storage import is_folder, is_remote

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that read tokenizer.json as it is. Others may replace its normalizer and pre-tokenizer."""
_COMPARED_CHARACTERS, _TEXT_CHARACTERS = 400_000, 80
_SHORTEST_NAME, _NAMED = 3, 5
_MUCH_UNKNOWN = 0.05


def tokenizer_remarks(config: ConvertConfig, tokenizer: Tokenizer) -> list[str]:
    """Return what a conversion does otherwise than the tokenizer, and what the tokenizer leaves out."""
    remarks, place = [], f"tokenizer {config.tokenizer}"
    if tokenizer.dropout is not None:
        remarks.append(f"{place}: its BPE dropout of {tokenizer.dropout:g} is turned off")
    if tokenizer.drops_unknown:
        remarks.append(f"{place}: has no unknown token, and leaves out characters that are not in its vocabulary")
    if tokenizer.puts_bos and not config.add_bos:
        name = tokenizer.tokenizer.id_to_token(tokenizer.require("bos"))
        advice = "a model that was trained with it and is continued on these rows needs add_bos=true"
        remarks.append(f"{place}: puts {name} (BOS) before each text, and the rows have none: {advice}")
    return remarks


class TextChecks:
    """Counts the names of special tokens in texts, and the tokens that stand for text unknown to the tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._unknown_id = tokenizer.unknown_id
        # Shorter names, such as `!` where it is the padding, are ordinary text.
        names = {str(tokenizer.tokenizer.id_to_token(token)) for token in tokenizer.special_ids}
        names = {name for name in names | _listed_names(tokenizer, "special") if len(name) >= _SHORTEST_NAME}
        self._beginnings = {name[:2] for name in names}
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._special_names: Counter[str] = Counter()
        self._tokens = self._unknown = 0

    def add(self, text: str, tokens: np.ndarray) -> None:
        """Count a document: its text, and its token ids [tokens]."""
        if any(beginning in text for beginning in self._beginnings):
            self._special_names.update(self._names.findall(text))
        if self._unknown_id is not None:
            self._tokens += len(tokens)
            self._unknown += int(np.count_nonzero(tokens == self._unknown_id))

    def record(self) -> dict[str, Any]:
        names = dict(self._special_names.most_common(50))
        return {"special_names": names, "tokens": self._tokens, "unknown_tokens": self._unknown}


def merge_checks(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of several parts of a text."""
    names, counts = Counter[str](), Counter[str]()
    for record in records:
        names.update(record["special_names"])
        counts.update({name: record[name] for name in ("tokens", "unknown_tokens")})
    return {"special_names": dict(names.most_common()), **counts}


def text_warnings(checks: dict[str, Any]) -> list[str]:
    """Return the warnings about counts of `merge_checks`."""
    warnings, names = [], Counter(checks["special_names"])
    if names:
        named = ", ".join(f"{name} ({count:,})" for name, count in names.most_common(_NAMED))
        named += " and others" * (len(names) > _NAMED) + "; if one separates documents, set source.separator"
        warnings.append(f"the text holds names of special tokens, which are encoded as plain text: {named}")
    share = checks["unknown_tokens"] / max(checks["tokens"], 1)
    if share >= _MUCH_UNKNOWN:
        warnings.append(f"{share:.0%} of the tokens stand for text that is unknown to the tokenizer")
    return warnings


def require_same_encoding(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Raise a UserError if AutoTokenizer, with which a model's users encode, encodes a text otherwise; it shows the part.

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


def _listed_names(tokenizer: Tokenizer, kind: str | None = None) -> set[str]:
    """Return the added tokens that tokenizer_config.json lists (`special` ones); tokenizer.json may lack some."""
    listed = (tokenizer.settings.get("added_tokens_decoder") or {}).values()
    return {token["content"] for token in listed if isinstance(token, dict) and (kind is None or token.get(kind))}


def _is_plain(tokenizer: Tokenizer) -> bool:
    """Return whether AutoTokenizer certainly reads tokenizer.json as it is."""
    added, place = tokenizer.tokenizer.get_added_tokens_decoder().values(), tokenizer.source
    others = _listed_names(tokenizer) - {token.content for token in added}
    has_model = not is_remote(place) and (not is_folder(place) or Path(place, "config.json").is_file())
    return tokenizer.settings.get("tokenizer_class") in _PLAIN_CLASSES and not others and not has_model


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
            reason = f"not compared with AutoTokenizer, which can't load it ({first_line(error)})"
            print(f"tokenizer {tokenizer.source}: {reason}")
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
