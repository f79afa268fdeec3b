"""What a conversion checks of its tokenizer: names of special tokens, and text that it doesn't know."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from biphasic.config.convert import ConvertConfig
from biphasic.data.same_encoding import listed_names
from biphasic.data.tokenizer import Tokenizer

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
        names = {name for name in names | listed_names(tokenizer, "special") if len(name) >= _SHORTEST_NAME}
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
