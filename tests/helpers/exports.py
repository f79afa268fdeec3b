"""Exports of networks in memory."""

from __future__ import annotations

from pathlib import Path

from biphasic.data.tokenizer import Tokenizer
from biphasic.export.formats import choose_format
from biphasic.export.write import Weights, write_folder
from biphasic.model.language_model import LanguageModel


def export_language_model(model: LanguageModel, tokenizer: Tokenizer, out: Path, *, force: bool = False) -> None:
    """Write backbone and head in fp32, with a card of one word."""
    fmt, weights = choose_format(model.config, tokenizer), Weights.in_memory(model.state_dict())
    write_folder(fmt, "masked_lm", weights, tokenizer, out, "card", force=force)
