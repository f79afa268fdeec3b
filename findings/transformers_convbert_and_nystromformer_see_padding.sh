#!/usr/bin/env bash
# transformers 5.23.0: hidden states of ConvBERT and Nystromformer depend on padding that `attention_mask` hides.
#
# Expected: a text has the same hidden states alone and in a batch beside a longer text, padded and with its `attention_mask`, as BERT's,
# DeBERTa's and MPNet's are (within 1e-5).
# Seen: with random weights, hidden states of a text of 6 tokens change by 26% (ConvBERT) and 34% (Nystromformer) of the largest one beside
# 11 tokens of padding, the first token's too. So embeddings and scores depend on the texts that a batch happens to have. Nothing is
# raised or warned.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/padding.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoModel, BertConfig, ConvBertConfig, DebertaV2Config, MPNetConfig, NystromformerConfig

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0,
}
TEXT = torch.arange(5, 11)[None]


def difference(config):
    """Of hidden states alone and padded, relative to the largest one, at the first and at any token."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data = 0.2 * torch.randn(weight.shape, generator=generator) + 0.3 * (weight.ndim == 1)
    padded = torch.zeros(1, 17, dtype=torch.long)
    padded[0, :6] = TEXT
    with torch.no_grad():
        alone = model(input_ids=TEXT, attention_mask=torch.ones_like(TEXT)).last_hidden_state
        beside = model(input_ids=padded, attention_mask=(padded > 0).long()).last_hidden_state[:, :6]
    changes = (alone - beside).abs().amax(-1)[0] / alone.abs().max()
    return changes[0].item(), changes.max().item()


print(f"transformers {transformers.__version__} torch {torch.__version__}")
print("expected: the same hidden states with and without padding")
seen = {}
for config in (BertConfig, DebertaV2Config, MPNetConfig, ConvBertConfig, NystromformerConfig):
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "embedding_size": 32}
    seen[config.model_type] = difference(config(**SIZES, **options))
    first, largest = seen[config.model_type]
    print(f"seen: {config.model_type}: largest change {largest:.1e}, of the first token {first:.1e}")
equal = all(seen[name][1] < 1e-5 for name in ("bert", "deberta-v2", "mpnet"))
sys.exit(not (equal and seen["convbert"][1] > 0.01 and seen["nystromformer"][1] > 0.01))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/padding.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
