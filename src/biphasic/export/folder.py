"""Read and write the files that every exported folder has, for the steps after an export. Imports no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from biphasic.errors import UserError
from biphasic.storage import open_store

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

EXPORT_FILE = "biphasic.json"
"""A folder with this file is an export, which another export may replace."""
CARD_FILE = "README.md"


def require_export(folder: Path) -> None:
    """Raise a UserError if the folder isn't an export."""
    if not (folder / EXPORT_FILE).is_file():
        raise UserError(f"{folder} is not an exported folder (it has no {EXPORT_FILE}): export a checkpoint first")


def read_card(folder: Path) -> ModelCard:
    """Read the folder's model card.

    Raises:
        UserError: the folder isn't an export, or its card can't be read or would be refused by the hub.
    """
    from biphasic.export.metadata import parse_card

    require_export(folder)
    try:
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CARD_FILE} can't be read: {error}") from None
    return parse_card(text)


def write_card(folder: Path, card: ModelCard) -> None:
    """Replace the folder's model card, atomically.

    Raises:
        UserError: the card can't be written, or the hub would refuse it.
    """
    from biphasic.export.metadata import parse_card

    text = str(card)
    parse_card(text)
    try:
        open_store(str(folder)).write(CARD_FILE, text.encode())
    except OSError as error:
        raise UserError(f"{folder / CARD_FILE} can't be written: {error}") from None
