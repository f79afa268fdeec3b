"""Small models in the format of the paper's own checkpoints (`sl_model`), with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.tiny import WORDS, write_tokenizer

WIDTH, FFN, LAYERS, HEADS, KV_HEADS, THETA, EPS = 32, 48, 2, 4, 2, 10_000.0, 1e-5
CONFIG = {
    "architectures": ["SLModel"], "model_type": "sl_model", "vocab_size": WORDS, "hidden_size": WIDTH,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": EPS,
    "rope_theta": THETA, "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "initializer_range": 0.02, "is_causal": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 2, "mask_token_id": 3, "pretraining_tp": 1, "classifier_pooling": "mean", "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_sl_model.SLModelConfig", "AutoModel": "modeling_sl_model.SLModel"},
}  # fmt: skip


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (WORDS, WIDTH), "norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        of_layer = {
            "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (kv, WIDTH), "self_attn.v_proj": (kv, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH),
            "mlp.down_proj": (WIDTH, FFN), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }


def write_model(folder: Path, head: Tensor | None = None) -> Path:
    """Write the files of a released model; with a head in the names of a model with one."""
    write_tokenizer(folder)
    weights = weights_of()
    if head is not None:
        weights = {**{f"model.{name}": weight for name, weight in weights.items()}, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
