"""EuroBERT's configuration for transformers 4.57; apart from the network, whose import needs the auto classes complete."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.llama.configuration_llama import LlamaConfig


class EuroBertConfig(LlamaConfig):
    """A Llama configuration with a mask token and a pooling for classification.

    transformers 5 writes the rotary base as `rope_parameters`, 4.57 reads `rope_theta`: both are kept.
    """

    model_type = "eurobert"

    def __init__(
        self,
        mask_token_id: int = 128002,
        classifier_pooling: str = "late",
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if rope_parameters is not None and "rope_theta" in rope_parameters:
            kwargs["rope_theta"] = rope_parameters["rope_theta"]
        defaults = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 250_000.0}
        tokens = {"pad_token_id": 128001, "bos_token_id": 128000, "eos_token_id": 128001}
        super().__init__(**{**defaults, **tokens, **kwargs})
        self.mask_token_id = mask_token_id
        self.classifier_pooling = classifier_pooling
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": self.rope_theta}


if int(transformers.__version__.split(".")[0]) < 5:  # transformers 5 has its own
    AutoConfig.register("eurobert", EuroBertConfig, exist_ok=True)
