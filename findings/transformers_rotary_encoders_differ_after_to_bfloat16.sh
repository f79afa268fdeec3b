#!/usr/bin/env bash
# transformers 5.23.0: an encoder with rotary positions that is converted by `.to(torch.bfloat16)` computes other hidden states than one
# that is loaded with `dtype=torch.bfloat16`.
#
# `from_pretrained(dtype=torch.bfloat16)` keeps the frequencies of the positions in fp32. `.to(torch.bfloat16)`, `.bfloat16()` and `.half()`
# round them too, because they are a buffer: at position 4,000 the angles are wrong by radians. Hidden states of 4,096 tokens of a
# random EuroBERT, ModernBERT and NomicBERT are then, after `.to(torch.bfloat16)`, 5 or more times further from fp32 than those of the
# model that was loaded in bf16.
# Load in the dtype that you want; SentenceTransformer takes `model_kwargs={"dtype": torch.bfloat16}`.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 torch==2.11.0 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/rotary_bf16.py" <<'PYTHON'
import logging

import torch
from transformers import AutoModel, EuroBertConfig, ModernBertConfig, NomicBertConfig

logging.disable(logging.WARNING)
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 500,
         "max_position_embeddings": 8192, "initializer_range": 0.15, "pad_token_id": 0}


def load(dtype):
    return AutoModel.from_pretrained("encoder", dtype=dtype).eval()


@torch.no_grad()
def hidden_states(model, ids):
    return model(ids).last_hidden_state.float()


for config in (
    EuroBertConfig(**SIZES, num_key_value_heads=2, head_dim=64), ModernBertConfig(**SIZES), NomicBertConfig(**SIZES)
):
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained("encoder")
    for length in (128, 4096):
        ids = torch.randint(5, 500, (1, length))
        exact = hidden_states(load(torch.float32), ids)
        error = {}
        for way, model in (
            ("from_pretrained(dtype=bfloat16)", load(torch.bfloat16)),
            (".to(bfloat16)", load(torch.float32).to(torch.bfloat16)),
            (".half()", load(torch.float32).half()),
        ):
            error[way] = ((hidden_states(model, ids) - exact).norm() / exact.norm()).item()
        print(f"{type(config).__name__}, {length} tokens: difference from fp32: "
              + ", ".join(f"{way} {value:.1%}" for way, value in error.items()))
        loaded, converted, half = error.values()
        assert loaded < 0.04
        if length == 4096:
            assert converted > 5 * loaded and half > 1.5 * loaded
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/rotary_bf16.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
