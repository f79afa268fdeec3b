"""Export formats of a network: EuroBERT's, which needs no code, or the decoder family's with a Python file."""

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

from biphasic.data.tokenizer import Tokenizer

_LLAMA_SHAPED = ("llama", "eurobert", "mistral")
"""Families whose layers have the same parameters as EuroBERT's."""
_DIMENSIONS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "initializer_range", "hidden_act", "tie_word_embeddings",
)  # fmt: skip
Kind = Literal["model", "masked_lm", "sequence", "token"]
"""The network to export: the bare encoder, or with a language-model head, a text classifier or a token classifier."""


@dataclass(frozen=True)
class Format:
    """The export format of a network.

    Attributes:
        name: the `model_type` in config.json.
        config: the network's Hugging Face configuration.
        classes: the network's class for each kind.
        files: contents of additional files in the folder, by file name.
    """

    name: str
    config: Any
    classes: Mapping[Kind, Any]
    files: Mapping[str, str] = field(default_factory=dict)

    def network(self, kind: Kind) -> Any:
        """Return the network on the meta device."""
        with torch.device("meta"):
            return self.classes[kind](self.config)


def is_llama_shaped(config: Any) -> bool:
    """Return whether EuroBERT's format can represent a network with this Hugging Face configuration."""
    shaped = config.model_type in _LLAMA_SHAPED and not getattr(config, "sliding_window", None)
    biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    return shaped and not biases and config.rope_parameters["rope_type"] == "default"


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of the special tokens under the keys of a Hugging Face configuration."""
    return {f"{role}_token_id": token for role, token in tokenizer.role_ids.items()}


def eurobert_format(config: Any, tokenizer: Tokenizer) -> Format:
    """Return EuroBERT's format for a configuration for which `is_llama_shaped` is true."""
    content: dict[str, Any] = {**{name: getattr(config, name) for name in _DIMENSIONS}, **special_token_ids(tokenizer)}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    classes: dict[Kind, Any] = {
        "model": EuroBertModel,
        "masked_lm": EuroBertForMaskedLM,
        "sequence": EuroBertForSequenceClassification,
        "token": EuroBertForTokenClassification,
    }
    return Format("eurobert", EuroBertConfig(**content, head_dim=head_dim, classifier_pooling="mean"), classes)
