"""What every exported folder has, for steps that come after its export and need no network."""

from __future__ import annotations

from pathlib import Path

from biphasic.config.errors import UserError
from biphasic.storage import store

MARK = "biphasic.json"
"""In every export: says that the folder is one, and may be replaced by another."""
CARD = "README.md"


def require_export(folder: Path) -> None:
    """Raise a UserError where the folder isn't an export."""
    if not (folder / MARK).is_file():
        raise UserError(f"{folder} is not an exported folder (it has no {MARK}): export a checkpoint first")


def read_card(folder: Path) -> str:
    """The folder's model card.

    Raises:
        UserError: the folder isn't an export, or its card can't be read.
    """
    require_export(folder)
    try:
        return (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CARD} can't be read: {error}") from None


def write_card(folder: Path, card: str) -> None:
    """Replace the folder's model card; it is the old one or the new one.

    Raises:
        UserError: it can't be written.
    """
    try:
        store(str(folder)).write(CARD, card.encode())
    except OSError as error:
        raise UserError(f"{folder / CARD} can't be written: {error}") from None
