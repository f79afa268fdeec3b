"""In what format a network is written: EuroBERT's, which needs no code, or its own family's with a small file of code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
)

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer

LLAMA_SHAPED = ("llama", "eurobert", "mistral")
"""Families whose layers are EuroBERT's, parameter by parameter."""
Kind = Literal["model", "masked_lm", "sequence", "token"]
"""What is written: the bare encoder, with its language-model head, with a classifier of texts, of tokens."""


@dataclass(frozen=True)
class Format:
    """A network's format.

    Attributes:
        name: of the format: config.json's `model_type`.
        config: its configuration.
        classes: the network's class for each kind.
        files: what else lies in the folder, by name; text.
    """

    name: str
    config: Any
    classes: Mapping[Kind, Any]
    files: Mapping[str, str] = field(default_factory=dict)

    def network(self, kind: Kind) -> Any:
        """The network, on the meta device."""
        with torch.device("meta"):
            return self.classes[kind](self.config)


def is_llama_shaped(config: Any) -> bool:
    """Whether EuroBERT's format has a place for all parts of a network with this Hugging Face configuration."""
    shaped = config.model_type in LLAMA_SHAPED and not getattr(config, "sliding_window", None)
    biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    return shaped and not biases and config.rope_parameters["rope_type"] == "default"


def format_of(config: Any, tokenizer: Tokenizer) -> Format:
    """EuroBERT's format where it has a place for the network, else the family's own.

    Args:
        config: the backbone's Hugging Face configuration.
        tokenizer: the encoder's; its special tokens go into the configuration.

    Raises:
        UserError: neither can hold it.
    """
    if is_llama_shaped(config):
        return eurobert_format(config, tokenizer)
    if config.model_type == "eurobert":
        raise UserError("export: a eurobert model with rope scaling or biases can't be written as a plain eurobert one")
    from biphasic.export.bidirectional import bidirectional_format  # it builds a small network to prove itself

    return bidirectional_format(config, tokenizer)


def eurobert_format(config: Any, tokenizer: Tokenizer) -> Format:
    """EuroBERT's, for what `is_llama_shaped`."""
    classes = (EuroBertModel, EuroBertForMaskedLM, EuroBertForSequenceClassification, EuroBertForTokenClassification)
    kinds: tuple[Kind, ...] = ("model", "masked_lm", "sequence", "token")
    return Format("eurobert", _eurobert_config(config, tokenizer), dict(zip(kinds, classes, strict=True)))


def special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    """What config.json says of them."""
    return {
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "mask_token_id": tokenizer.mask_id,
    }


def _eurobert_config(config: Any, tokenizer: Tokenizer) -> EuroBertConfig:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "initializer_range",
        "hidden_act",
        "tie_word_embeddings",
    )
    content: dict[str, Any] = {**{name: getattr(config, name) for name in names}, **special_tokens(tokenizer)}
    return EuroBertConfig(**content, head_dim=head_dim, classifier_pooling="mean")
