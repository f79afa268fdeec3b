"""EuroBERT's configuration for transformers 4.57; apart from the network, whose import needs the auto classes complete."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.llama.configuration_llama import LlamaConfig

# transformers 5's own: a configuration that leaves a key out must mean the same to both.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "pad_token_id": 128_001,
}


class EuroBertConfig(LlamaConfig):
    """A Llama configuration with a mask token and a pooling for classification.

    transformers 5 writes the rotary positions as `rope_parameters`, 4.57 reads `rope_theta` and `rope_scaling`: all are
    kept, and say the same.
    """

    model_type = "eurobert"

    def __init__(
        self,
        mask_token_id: int = 128_002,
        classifier_pooling: str = "late",
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        rope = dict(rope_parameters or {})
        if "rope_theta" in rope:
            kwargs["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            kwargs["rope_scaling"] = rope
        super().__init__(**{**_DEFAULTS, **kwargs})
        self.mask_token_id = mask_token_id
        self.classifier_pooling = classifier_pooling
        self.rope_parameters = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}


if int(transformers.__version__.split(".")[0]) < 5:  # transformers 5 has its own
    AutoConfig.register("eurobert", EuroBertConfig, exist_ok=True)
