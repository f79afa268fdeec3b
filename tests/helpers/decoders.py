"""Small decoders of families that are not Llama-shaped, and texts for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from biphasic.model.forward import packed_forward
from biphasic.model.language_model import LanguageModel, from_hf_config
from biphasic.model.segments import Segments
from helpers.backbones import OTHER_SIZES, SMALL
from helpers.tiny import LENGTH, PAD, WORDS

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "olmo2": {},
    "smollm3": {},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "cohere": OTHER_SIZES["cohere"],
    "granite": OTHER_SIZES["granite"],
    "llama": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        "attention_bias": True,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
}
TEXTS = [[5, 6, 7, 8, 9, 10, 11, 2], [12, 13, 2], [14, 15, 16, 17, 2]]


def decoder(family: str, **changes: Any) -> LanguageModel:
    """With weights large enough that an error shows, and five layers, since in some families every fourth differs."""
    config = AutoConfig.for_model(
        family,
        **{**SMALL, "vocab_size": WORDS, "num_hidden_layers": 5, "max_position_embeddings": LENGTH},
        **{**FAMILIES[family], **changes},
    )
    model = from_hf_config(config, seed=1)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def saved_decoder(family: str, folder: Path, **changes: Any) -> Any:
    """Save a small random model of the family with its language-model head, as on the hub."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": WORDS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pad_token_id": None,
            **OTHER_SIZES.get(family, {}),
            **changes,
        },
    )
    torch.manual_seed(5)
    head_class = AutoModelForMaskedLM if family in ("eurobert", "modernbert") else AutoModelForCausalLM
    model = head_class.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def padded(left: bool = False, texts: list[list[int]] = TEXTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens and their mask."""
    length = max(map(len, texts))
    padding = [[PAD] * (length - len(text)) for text in texts]
    rows = [p + t if left else t + p for t, p in zip(texts, padding, strict=True)]
    tokens = torch.tensor(rows)
    return tokens, (tokens != PAD).long()


@torch.no_grad()
def packed(backbone: Any, texts: list[list[int]] = TEXTS) -> torch.Tensor:
    """Hidden states of all tokens by packed attention, one text after another."""
    segments = Segments.of([len(text) for text in texts], torch.device("cpu"))
    return packed_forward(backbone, torch.tensor([token for text in texts for token in text]), segments, causal=False)
