"""Exports of networks in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from biphasic.data.tokenizer import Tokenizer
from biphasic.export.weights import Weights
from biphasic.export.write import choose_format, write_language_model
from biphasic.model.language_model import LanguageModel


def export_language_model(model: LanguageModel, tokenizer: Tokenizer, out: Path, *, force: bool = False) -> None:
    """Write backbone and head in fp32, with a card of one word."""
    fmt, weights = choose_format(model.config, tokenizer), Weights.in_memory(model.state_dict())
    write_language_model(fmt, weights, tokenizer, out, "card", dtype=torch.float32, force=force)
