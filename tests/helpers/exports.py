"""Exports of networks in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from biphasic.data.tokenizer import Tokenizer
from biphasic.export.formats import choose_format
from biphasic.export.write import Weights, write_folder
from biphasic.model.language_model import LanguageModel
from biphasic.model.pooling import SentenceSettings


def export_language_model(model: LanguageModel, tokenizer: Tokenizer, out: Path, *, force: bool = False) -> None:
    """Write backbone and head in fp32, with a card of one word."""
    fmt, weights = choose_format(model.config, tokenizer), Weights.in_memory(model.state_dict())
    write_folder(fmt, "masked_lm", weights, tokenizer, out, "card", force=force)


def export_encoder(
    backbone: nn.Module,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    *,
    prompts: dict[str, str] | None = None,
    max_length: int | None = None,
    **options: Any,
) -> None:
    """Write an encoder without a head; the options are those of `write_folder`."""
    settings = SentenceSettings(prompts or {}, max_length=max_length)
    weights = Weights.in_memory(backbone.state_dict())
    write_folder(choose_format(backbone.config, tokenizer), "model", weights, tokenizer, out, card, settings, **options)
