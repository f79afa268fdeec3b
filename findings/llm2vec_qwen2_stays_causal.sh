#!/usr/bin/env bash
# llm2vec 0.2.3, transformers 4.44.2: Qwen2BiModel and Qwen2BiForMNTP stay causal with sdpa and eager attention.
#
# Expected: the bidirectional classes of llm2vec let each position attend to later ones, as its Llama, Mistral and Gemma do.
# Seen: with Qwen2 no position attends to a later one, and nothing warns. These classes set `is_causal` of the attention to False, which only
# flash attention reads; the mask for the others is made by transformers' Qwen2Model, as for a decoder. It is so with each transformers that
# llm2vec allows (4.43.1 to 4.44.2). A model trained with sdpa, transformers' choice, never learns to look ahead. By the source, one trained
# with flash attention does, and would give other embeddings on a CPU; that was not run.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(llm2vec==0.2.3 transformers==4.44.2 peft==0.21.2 accelerate==1.15.0 torch==2.7.0 numpy==1.26.4)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/bidirectional.py" <<'PYTHON'
import importlib.metadata as metadata
import logging
import warnings

import torch

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from llm2vec.models import GemmaBiModel, LlamaBiModel, MistralBiModel, Qwen2BiForMNTP, Qwen2BiModel
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config

print("llm2vec", metadata.version("llm2vec"), "transformers", metadata.version("transformers"))
print("expected: another last token changes the first position's output, in each family")
size = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
seen = {}
for config_class, model_class in (
    (LlamaConfig, LlamaBiModel), (MistralConfig, MistralBiModel), (GemmaConfig, GemmaBiModel),
    (Qwen2Config, Qwen2BiModel), (Qwen2Config, Qwen2BiForMNTP),
):
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = config_class(**size, **({"head_dim": 8} if config_class is GemmaConfig else {}))
        config._attn_implementation = attention
        model = model_class(config).eval()
        tokens = torch.arange(1, 13)[None]
        other = tokens.clone()
        other[0, -1] = 40
        mask = torch.ones_like(tokens)
        with torch.no_grad():
            first, changed = (model(ids, attention_mask=mask)[0][0, 0] for ids in (tokens, other))
        change = float((first - changed).abs().max())
        seen[model_class.__name__, attention] = change
        print(f"seen: {model_class.__name__}, {attention}: the first position's output changes by {change:.1e}")
causal = {name for (name, _), change in seen.items() if change == 0}
bidirectional = {name for (name, _), change in seen.items() if change > 1e-4}
same = causal == {"Qwen2BiModel", "Qwen2BiForMNTP"} and bidirectional == {"LlamaBiModel", "MistralBiModel", "GemmaBiModel"}
raise SystemExit(0 if same else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/bidirectional.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
