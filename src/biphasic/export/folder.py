"""The files of every exported folder, and its model card as the hub reads it. Imports no PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from biphasic.errors import UserError
from biphasic.storage import user_errors

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

EXPORT_FILE = "biphasic.json"
"""A folder with this file is an export, which another export may replace."""
CARD_FILE = "README.md"
_ID = (r"[\w.-]+(/[\w.-]+)?", "an id on the hub, such as org/name")
_ACCEPTED = {
    "license": (r"[a-z0-9][a-z0-9.\-]*", "one of its identifiers, such as apache-2.0 or other"),
    "language": (r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", "an ISO 639 code, such as en"),
    "datasets": _ID,
    "base_model": _ID,
    "tags": (r".+", "a word"),
}
"""Pattern and description of the values that the hub accepts for a key. Its list of licenses is only on the hub."""


def has_export(folder: Path, source: Mapping[str, Any]) -> bool:
    """Return whether a folder has an export whose record of its source has these values, or one that has no such record.

    Raises a UserError if the export's record can't be read.
    """
    with user_errors(f"{folder / EXPORT_FILE} can't be read", ValueError):
        if not (folder / EXPORT_FILE).is_file():
            return False
        recorded = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8")).get("source", source)
        return all(recorded.get(key) == value for key, value in source.items())


def require_export(folder: Path) -> None:
    """Raise a UserError if the folder isn't an export."""
    if not (folder / EXPORT_FILE).is_file():
        raise UserError(f"{folder} is not an exported folder (it has no {EXPORT_FILE}): export a checkpoint first")


def read_card(folder: Path) -> ModelCard:
    """Read the model card of an exported folder; a UserError if it isn't an export, or as for `parse_card`."""
    require_export(folder)
    with user_errors(f"{folder / CARD_FILE} can't be read", UnicodeDecodeError):
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
    return parse_card(text)


def parse_card(text: str) -> ModelCard:
    """Parse a model card; a UserError if it has no metadata, or the hub would refuse it."""
    from huggingface_hub import ModelCard

    refused = "model card: the hub would refuse its metadata"
    if not text.lstrip().startswith("---"):
        raise UserError("model card: it doesn't begin with a block of metadata between two lines of ---")
    try:
        card = ModelCard(text)
        # As texts, also what YAML takes for something else: `no` is Norwegian, and not false.
        written = yaml.load(text.split("---")[1], yaml.BaseLoader)
        for key in _ACCEPTED.keys() & written.keys():
            card.data[key] = written[key] or None
        if "model-index" in written:
            card.data["model_name"] = written["model-index"][0]["name"]
        # ModelCard keeps evaluation results as objects; damaged ones fail when they are written again.
        card.data.to_yaml()
    except Exception as error:  # YAML errors, and any error that damaged results cause
        raise UserError(f"{refused}: {' '.join(str(error).split())}") from None
    for key, (pattern, expected) in _ACCEPTED.items():
        value: Any = card.data.get(key)
        for word in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(word, str) or not re.fullmatch(pattern, word):
                raise UserError(f"{refused}: {key} {word!r} is not {expected}")
    return card


def quote_numbers(card: str) -> str:
    """Quote texts in a card's metadata that are numbers in YAML 1.2, which the hub reads, but not in PyYAML's 1.1."""
    metadata, end, text = card.partition("\n---")
    number = r"[-+]?(?:\d+[eE][-+]?\d+|\d*\.\d*[eE]\d+|0o[0-7]+)"
    return re.sub(rf"(?m)^(\s*(?:- )?(?:[\w-]+: )?)({number})$", r"\1'\2'", metadata) + end + text


def hub_id(path: Any) -> str | None:
    """Return `path` if it is a repository's name on the hub (`organisation/name`) and not a local path, else None."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not isinstance(path, str) or path.count("/") != 1 or path.endswith((".pt", ".yaml")) or Path(path).exists():
        return None
    try:
        validate_repo_id(path)
    except HFValidationError:
        return None
    return path
