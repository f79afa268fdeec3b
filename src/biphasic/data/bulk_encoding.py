"""Encode many texts: with `gigatoken`, several times faster, where it gives the ids of `tokenizers`."""

import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError, first_line

Backend = Literal["tokenizers", "gigatoken"]
_RENEWED_AFTER = 1 << 27
"""Characters after which gigatoken's cache of words is emptied. It has no limit: 1.3 GB for words that never repeat."""
_SHOWN = 60


class DifferentIdsError(UserError):
    """gigatoken encodes a text to other ids than tokenizers, or can't encode it."""


class BulkEncoder:
    """Encodes texts as `Tokenizer.encode` does, with the library that `backend` names.

    Raises a DifferentIdsError if gigatoken isn't installed, or doesn't know this kind of tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Backend):
        self._tokenizer = tokenizer
        self._gigatoken = _load(tokenizer) if backend == "gigatoken" else None
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return each text's token ids [tokens], without special tokens. Their names in a text are plain text."""
        if self._gigatoken is None:
            return [np.array(ids, np.uint32) for ids in self._tokenizer.encode(list(texts))]
        self._characters += sum(map(len, texts))
        if self._characters > _RENEWED_AFTER:
            self._gigatoken, self._characters = _load(self._tokenizer), 0
        with _gigatoken_errors(f"tokenizer {self._tokenizer.source}: gigatoken can't encode a text"):
            return [self._gigatoken.encode(text) for text in texts]

    def compare(self, text: str, ids: NDArray[np.integer]) -> None:
        """Raise a DifferentIdsError, which shows the place, if `tokenizers` encodes this text to other ids than `ids`."""
        if self._gigatoken is None or ids.tolist() == (expected := self._tokenizer.encode([text])[0]):
            return
        place = next((i for i, (one, other) in enumerate(zip(ids, expected, strict=False)) if one != other), len(ids))
        start = len(self._tokenizer.tokenizer.decode(expected[:place], skip_special_tokens=False))
        name = self._tokenizer.tokenizer.id_to_token
        names = [[name(int(token)) for token in each[place : place + 3]] for each in (ids, expected)]
        problem = f"gigatoken and tokenizers encode a text of {len(text):,} characters differently"
        where = f"from {text[start : start + _SHOWN]!r}: {names[0]} and {names[1]}"
        raise DifferentIdsError(f"tokenizer {self._tokenizer.source}: {problem}, {where}")


def choose_backend(tokenizer: Tokenizer, wanted: Backend | Literal["auto"], texts: list[str]) -> tuple[Backend, str]:
    """Choose the library that encodes these texts with less time of the CPU, and say why.

    `auto` takes gigatoken if it is installed, gives the same ids and is faster. Raises a UserError if `gigatoken` is wanted
    and can't be used or gives other ids.
    """
    if wanted == "tokenizers":
        return "tokenizers", "tokenizer_backend: tokenizers"
    if wanted == "auto" and importlib.util.find_spec("gigatoken") is None:
        return "tokenizers", "gigatoken, which is faster, is not installed: the extra biphasic[fast]"
    try:
        encoder = BulkEncoder(tokenizer, "gigatoken")
        start = time.process_time()
        encoded = encoder.encode(texts)
        ours = time.process_time() - start
        start = time.process_time()
        for text, ids in zip(texts, encoded, strict=True):
            encoder.compare(text, ids)
        ratio = (time.process_time() - start) / max(ours, 1e-9)
    except DifferentIdsError as error:
        if wanted == "gigatoken":
            raise UserError(f"tokenizer_backend: gigatoken: {error}; expected auto or tokenizers") from None
        return "tokenizers", str(error)
    if ratio < 1 and wanted == "auto":
        return "tokenizers", f"gigatoken takes {1 / max(ratio, 1e-9):.1f} times its time for these texts"
    return "gigatoken", f"{ratio:.1f} times as fast as tokenizers, with the same ids for {len(texts):,} texts"


def _load(tokenizer: Tokenizer) -> Any:
    """Return gigatoken's tokenizer, which has no special tokens, so that it finds none in a text."""
    content = json.loads(tokenizer.tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    content["post_processor"] = None
    with _gigatoken_errors(f"tokenizer {tokenizer.source}: gigatoken can't be used with it"):
        import gigatoken

        return gigatoken.Tokenizer.from_json(json.dumps(content)).backend


@contextmanager
def _gigatoken_errors(message: str) -> Iterator[None]:
    """Raise a DifferentIdsError with this message for any error of gigatoken, also a panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DifferentIdsError(f"{message} ({first_line(error)})") from None
