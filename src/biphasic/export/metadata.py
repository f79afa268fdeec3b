"""Check that the hub accepts a model card, with huggingface_hub's parser and the rules that the parser doesn't check."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from biphasic.errors import UserError

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.\-]*")


def parse_card(text: str) -> ModelCard:
    """Parse a model card.

    Raises:
        UserError: the card has no metadata, or the hub would refuse the metadata.
    """
    if not text.lstrip().startswith("---"):
        raise UserError("model card: it doesn't begin with a block of metadata between two lines of ---")
    try:
        card = ModelCard(text)
        # ModelCard keeps evaluation results as objects; damaged ones fail when they are written again.
        card.data.to_yaml()
        _require_accepted(card.data)
    except UserError:
        raise
    except Exception as error:  # YAML errors, and any error that damaged results cause
        raise _refused(" ".join(str(error).split())) from None
    return card


def _require_accepted(data: Any) -> None:
    for key in ("license", "library_name", "pipeline_tag"):
        value = data.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise _refused(f"{key} is {value!r}, not a word")
    lists = {key: _words(key, data.get(key)) for key in ("tags", "language", "datasets", "base_model")}
    for key in ("datasets", "base_model"):
        for name in lists[key]:
            require_id(name, f"model card: {key}")
    for language in lists["language"]:
        if not _LANGUAGE.fullmatch(language):
            raise _refused(f"language {language!r} is not an ISO 639 code such as en, nor multilingual or code")
    if data.license is not None and not _LICENSE.fullmatch(data.license):
        raise _refused(f"license {data.license!r} is not one of its identifiers, such as apache-2.0 or other")
    for result in data.eval_results or []:
        value = result.metric_value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(f"{result.metric_type} on {result.dataset_name} is {value!r}, not a number")


def _words(key: str, value: Any) -> list[str]:
    words = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise _refused(f"{key} is {value!r}, not a list of words")
    return words


def _refused(reason: str) -> UserError:
    return UserError(f"model card: the hub would refuse its metadata: {reason}")


def require_id(name: Any, prefix: str) -> None:
    """Raise a UserError, which begins with `prefix`, if `name` can't be a repository's name on the hub."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{prefix}: {' '.join(str(error).split())}") from None


def hub_id(path: Any) -> str | None:
    """Return `path` if it is the name of a repository on the hub (`organisation/name`) and not a local path, else None."""
    if not isinstance(path, str) or path.count("/") != 1 or path.startswith((".", "/", "~")) or "://" in path:
        return None
    if path.endswith((".pt", ".yaml")) or Path(path).exists():
        return None
    try:
        require_id(path, "")
    except UserError:
        return None
    return path
