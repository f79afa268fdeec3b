"""Build networks with new weights. Imports torch and transformers only, so benchmarks/gpu.py needs no other packages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from biphasic.config.architecture import Architecture
from biphasic.model import attention
from biphasic.model.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def llama_config(
    size: Architecture,
    positions: int,
    *,
    rms_norm_eps: float = 1e-5,
    rope_theta: float = 10_000.0,
    initializer_range: float = 0.02,
) -> PretrainedConfig:
    """Build the Hugging Face configuration of a Llama with these dimensions, for rows of up to `positions` tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,  # pyright: ignore[reportCallIssue] - transformers 5 takes it in `rope_parameters`
        initializer_range=initializer_range,
        tie_word_embeddings=size.tied,
        # transformers gives the padding token's embedding no gradient. In EuroBERT's tokenizer, padding and end of text are
        # the same token, so it would never be learned.
        pad_token_id=None,
        bos_token_id=None,  # pyright: ignore[reportArgumentType]
        eos_token_id=None,  # pyright: ignore[reportArgumentType]
    )


def from_hf_config(hf_config: PretrainedConfig, seed: int, device: str | None = None) -> LanguageModel:
    """Build a network with new weights in fp32, drawn from a normal distribution with std `initializer_range`.

    Args:
        hf_config: configuration of the backbone.
        seed: random seed for the weights. Different device types draw different weights from it.
        device: device to draw the weights on. Default: CPU. `meta` allocates no weights.
    """
    attention.register()
    from transformers import AutoModel

    forked = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=forked), torch.device(device) if device else nullcontext():
        torch.manual_seed(seed)
        backbone = AutoModel.from_config(hf_config, attn_implementation=attention.ATTENTION_NAME, dtype=torch.float32)
        lm_head = nn.Linear(hf_config.hidden_size, hf_config.vocab_size, bias=False)
        nn.init.normal_(lm_head.weight, std=hf_config.initializer_range)
    if hf_config.tie_word_embeddings:
        lm_head.weight = backbone.get_input_embeddings().weight
    return LanguageModel(backbone, lm_head)
