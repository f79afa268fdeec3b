#!/usr/bin/env bash
# transformers 5.23.0: `from_config` with another `attn_implementation` changes the models that were built from the same configuration.
#
# The implementation is written into the configuration that is passed, and models look it up there at each forward pass. So a second
# model with "sdpa" turns an "eager" one into "sdpa": its `output_attentions=True` returns an empty tuple, without a message, and a
# comparison of both implementations compares one with itself. Pass `copy.deepcopy(config)`.
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
cat >"$work/shared_configuration.py" <<'PYTHON'
import copy
import logging

import torch
from transformers import AutoModel, BertConfig

logging.disable(logging.WARNING)
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100)
ids = torch.arange(5, 15)[None]


@torch.no_grad()
def attentions(model):
    return len(model(ids, output_attentions=True).attentions)


for passed in (copy.deepcopy, lambda config: config):
    first = AutoModel.from_config(passed(config), attn_implementation="eager").eval()
    before = first.config._attn_implementation, attentions(first)
    AutoModel.from_config(passed(config), attn_implementation="sdpa")
    after = first.config._attn_implementation, attentions(first)
    print(f"{'a copy' if passed is copy.deepcopy else 'the same configuration'}: the first model is {before[0]} and returns the "
          f"attentions of {before[1]} layers; after a second model was built with sdpa, {after[0]} and {after[1]}")
    assert before == ("eager", 2) and after == (before if passed is copy.deepcopy else ("sdpa", 0))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/shared_configuration.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
