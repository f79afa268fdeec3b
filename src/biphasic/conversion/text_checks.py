"""What a conversion warns of: names of special tokens in the text, text unknown to the tokenizer, and a missing BOS."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from biphasic.config.convert import ConvertConfig
from biphasic.data.tokenizer import Tokenizer

_SHORTEST_NAME = 3
_SAMPLED_DOCUMENTS, _SAMPLED_CHARACTERS = 20, 2000
_NAMED = 5
_MUCH_UNKNOWN = 0.05


def tokenizer_remarks(config: ConvertConfig, tokenizer: Tokenizer) -> list[str]:
    """Return what a conversion does otherwise than the tokenizer: without BPE dropout, and without BOS."""
    remarks, place = [], f"tokenizer {config.tokenizer}"
    if tokenizer.dropout is not None:
        remarks.append(f"{place}: its BPE dropout of {tokenizer.dropout:g} is turned off")
    if tokenizer.puts_bos and not config.add_bos:
        name = tokenizer.tokenizer.id_to_token(tokenizer.require("bos"))
        remarks.append(
            f"{place}: puts {name} (BOS) before each text, and the rows have none: a model that was trained with it and "
            "is continued on these rows needs add_bos=true"
        )
    return remarks


class TextChecks:
    """Counts the names of special tokens in texts, and the tokens that stand for text unknown to the tokenizer.

    A tokenizer without an unknown token leaves such text out: then its characters are counted in a sample.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = {str(tokenizer.tokenizer.id_to_token(token)) for token in tokenizer.special_ids}
        listed = (tokenizer.settings.get("added_tokens_decoder") or {}).values()
        # tokenizer.json may lack some.
        names |= {token["content"] for token in listed if isinstance(token, dict) and token.get("special")}
        # Shorter ones, such as `!` where it is the padding, are ordinary text.
        names = {name for name in names if len(name) >= _SHORTEST_NAME}
        self._beginnings = {name[:2] for name in names}
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._sampled = 0
        self._counts: dict[str, Counter[str]] = {"special_names": Counter(), "unknown": Counter()}
        self._tokens = self._unknown = 0

    def add(self, text: str, tokens: np.ndarray) -> None:
        """Count a document: its text, and its token ids [tokens]."""
        if any(beginning in text for beginning in self._beginnings):
            self._counts["special_names"].update(self._names.findall(text))
        unknown_id, is_sampled = self._tokenizer.unknown_id, self._sampled < _SAMPLED_DOCUMENTS
        if unknown_id is not None:
            self._tokens += len(tokens)
            unknown = int(np.count_nonzero(tokens == unknown_id))
            self._unknown += unknown
            if unknown and is_sampled:
                self._sampled += 1
                [(ids, offsets)] = self._tokenizer.encode_with_offsets([text[:_SAMPLED_CHARACTERS]])
                pieces = (text[start:end] for id, (start, end) in zip(ids, offsets, strict=True) if id == unknown_id)
                self._counts["unknown"].update(pieces)
        elif self._tokenizer.drops_unknown and is_sampled:
            self._sampled += 1
            normalizer, start = self._tokenizer.tokenizer.normalizer, text[:_SAMPLED_CHARACTERS]
            characters = Counter("".join((normalizer.normalize_str(start) if normalizer else start).split()))
            lost = characters - Counter(self._tokenizer.tokenizer.decode(self._tokenizer.encode([start])[0]))
            self._tokens, self._unknown = self._tokens + characters.total(), self._unknown + lost.total()
            self._counts["unknown"].update(lost)

    def record(self) -> dict[str, Any]:
        """Return the counts for `merge_checks`."""
        most_frequent = {name: dict(counter.most_common(50)) for name, counter in self._counts.items()}
        return {**most_frequent, "tokens": self._tokens, "unknown_tokens": self._unknown}


def merge_checks(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of several parts of a text."""
    merged: dict[str, Any] = {"special_names": Counter(), "unknown": Counter(), "tokens": 0, "unknown_tokens": 0}
    for record in records:
        for name, counts in merged.items():
            merged[name] = counts + (Counter(record[name]) if isinstance(counts, Counter) else record[name])
    return {name: dict(each.most_common()) if isinstance(each, Counter) else each for name, each in merged.items()}


def text_warnings(checks: dict[str, Any]) -> list[str]:
    """Return the warnings about counts of `merge_checks`, the most frequent first."""
    warnings = []
    if checks["special_names"]:
        warnings.append(
            f"the text holds names of special tokens, which are encoded as plain text: "
            f"{_most_frequent(checks['special_names'])}; if one separates documents, set source.separator"
        )
    share = checks["unknown_tokens"] / max(checks["tokens"], 1)
    if share >= _MUCH_UNKNOWN:
        pieces = {repr(piece): count for piece, count in checks["unknown"].items()}
        warnings.append(f"{share:.0%} of the text is unknown to the tokenizer, most often {_most_frequent(pieces)}")
    return warnings


def _most_frequent(counts: dict[str, int]) -> str:
    named = [f"{name} ({count:,})" for name, count in Counter(counts).most_common(_NAMED)]
    return ", ".join(named) + (" and others" if len(counts) > _NAMED else "")
