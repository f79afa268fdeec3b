#!/usr/bin/env bash
# transformers 5.23.0, a decoder (Llama) called with packed rows: whether the segments of a row see each other depends on
# `use_cache`, whose default is True, though nothing is cached that an output of this call could come from.
#
# Expected: `position_ids` that begin anew at a segment separate the segments, or they don't, for the same rows and weights.
# Seen: with use_cache=False they do. With the default, and also with a mask of ones, the tokens of the second segment depend on
# those of the first, without a message; the loss still falls.
#
# Checked on 2026-11-28, Python 3.12, Linux x86-64, with torch 2.11.0 on a CPU.
# Exit status: 0 as described here, 1 if transformers behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" transformers==5.23.0 torch==2.11.0
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.11.0
fi
TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
size = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaModel(LlamaConfig(**size)).eval()
row = torch.arange(3, 11)[None]
other = row.clone()
other[0, 0] = 20  # the first token of the first of two segments of four tokens
positions = torch.arange(4).repeat(2)[None]


def second_segment_changes(**options):
    with torch.no_grad():
        before, after = (model(input_ids=ids, position_ids=positions, **options).last_hidden_state for ids in (row, other))
    return bool((before - after)[0, 4:].abs().max() > 1e-5)


seen = {
    "default": second_segment_changes(),
    "use_cache=False": second_segment_changes(use_cache=False),
    "use_cache=False and a mask of ones": second_segment_changes(use_cache=False, attention_mask=torch.ones_like(row)),
}
print(f"transformers {transformers.__version__}, torch {torch.__version__}: the second segment depends on the first:", seen)
sys.exit(seen != {"default": True, "use_cache=False": False, "use_cache=False and a mask of ones": True})
PYTHON
