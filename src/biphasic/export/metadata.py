"""The YAML block at the head of a model card, which the hub reads: writing it, and whether the hub would take it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from biphasic.config.errors import UserError

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.\-]*")
_WORDS = ("license", "library_name", "pipeline_tag")
_LISTS = ("tags", "language", "datasets", "base_model")


def block(content: Mapping[str, Any]) -> str:
    """The block, its delimiters included; what is None or empty is left out."""
    kept = {key: value for key, value in content.items() if value not in (None, [], {})}
    return f"---\n{yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000)}---\n"


def split(card: str) -> tuple[dict[str, Any], str]:
    """A card's metadata and what follows them.

    Raises:
        UserError: there is no such block, or it isn't a mapping.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    found = REGEX_YAML_BLOCK.search(card)
    if found is None:
        raise UserError("model card: it doesn't begin with a block of metadata between two lines of ---")
    try:
        content = yaml.safe_load(found.group(2))
    except yaml.YAMLError as error:
        raise UserError(f"model card: its metadata is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError("model card: its metadata is not a list of keys with values")
    return content, card[found.end() :]


def changed(card: str, **changes: Any) -> str:
    """The card with other metadata; keys are the hub's, with `_` for `-`."""
    content, body = split(card)
    renamed = {"model-index" if key == "model_index" else key: value for key, value in changes.items()}
    return block({**content, **renamed}) + body


def checked(card: str) -> str:
    """The card, if the hub's own parser and rules would take it.

    Raises:
        UserError: they wouldn't.
    """
    from huggingface_hub import ModelCard

    content, _ = split(card)
    try:
        data: Any = ModelCard(card).data
        # The parser keeps the results as objects; written again they must say the same.
        data.to_yaml()
    except Exception as error:
        raise _refused(" ".join(str(error).split())) from None
    for key in _WORDS:
        value = content.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise _refused(f"{key} is {value!r}, not a word")
    for key in _LISTS:
        values = _listed(content, key)
        if key in ("datasets", "base_model"):
            for value in values:
                require_id(value, f"model card: {key}")
    for language in _listed(content, "language"):
        if not _LANGUAGE.fullmatch(language):
            raise _refused(f"language {language!r} is no code of ISO 639 such as en, nor multilingual or code")
    license_id = content.get("license")
    if license_id is not None and not _LICENSE.fullmatch(license_id):
        raise _refused(f"license {license_id!r} is none of its identifiers, such as apache-2.0 or other")
    for result in data.eval_results or []:
        value = result.metric_value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(f"{result.metric_type} on {result.dataset_name} is {value!r}, not a number")
    return card


def require_id(name: Any, where: str) -> None:
    """Raise a UserError where `name` can't be a repository's on the hub; `where` begins the message."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None


def hub_id(path: Any) -> str | None:
    """`path` where it names a repository of the hub and nothing on this machine: `organisation/name`."""
    if not isinstance(path, str) or path.count("/") != 1 or path.startswith((".", "/", "~")) or "://" in path:
        return None
    if path.endswith((".pt", ".yaml")) or Path(path).exists():
        return None
    try:
        require_id(path, "")
    except UserError:
        return None
    return path


def _listed(content: dict[str, Any], key: str) -> list[str]:
    value = content.get(key)
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise _refused(f"{key} is {value!r}, not a list of words")
    return values


def _refused(why: str) -> UserError:
    return UserError(f"model card: the hub would not take its metadata: {why}")
