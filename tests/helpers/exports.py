"""Exports of networks in memory."""

from pathlib import Path
from typing import Any

from biphasic.data.tokenizer import Tokenizer
from biphasic.export.formats import choose_format
from biphasic.export.write import write_folder
from biphasic.model.language_model import LanguageModel
from biphasic.model.pooling import SentenceSettings


def export_encoder(
    backbone: Any,
    tokenizer: Tokenizer,
    out: Path,
    card: str = "card",
    prompts: dict[str, str] | None = None,
    max_length: int | None = None,
    **options: Any,
) -> None:
    """Write an encoder without a head, in fp32 by default."""
    fmt, weights = choose_format(backbone.config, tokenizer), backbone.state_dict()
    settings = SentenceSettings(prompts or {}, max_length=max_length)
    write_folder(fmt, "Model", weights, tokenizer, out, card, settings, **options)


def export_language_model(model: LanguageModel, tokenizer: Tokenizer, out: Path, *, force: bool = False) -> None:
    """Write backbone and head in fp32, with a card of one word."""
    fmt, weights = choose_format(model.config, tokenizer), model.state_dict()
    write_folder(fmt, "ForMaskedLM", weights, tokenizer, out, "card", force=force)
