#!/usr/bin/env bash
# transformers 5.23.0: position_ids that begin anew separate packed texts in a decoder, and not in EuroBERT or ModernBERT.
#
# Expected: a row of two texts whose position_ids are 0, 1, 2, 0, 1, 2 is read as two texts by each model, or refused.
# Seen: with sdpa, eager and flex_attention, LlamaModel(use_cache=False) separates the texts: the second one's output doesn't change with
# the first. In EuroBertModel and ModernBertModel it does, under the same call: their masks are made from attention_mask alone, and the
# positions only turn the rotary embeddings. Nothing warns. So rows from DataCollatorWithFlattening, which are right for these
# encoders with flash attention, train another model without it.
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
cat >"$work/packed.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import EuroBertConfig, EuroBertModel, LlamaConfig, LlamaModel, ModernBertConfig, ModernBertModel

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
special_tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
torch.manual_seed(0)
first, other, second = torch.randint(3, 64, (3, 1, 6))
positions = torch.arange(6).repeat(2)[None]


@torch.no_grad()
def effect_of_the_first_text(model, **options):
    """The largest difference of the second text's output between rows that have another first text."""
    outputs = [
        model.eval()(input_ids=torch.cat([text, second], 1), position_ids=positions, **options).last_hidden_state[:, 6:]
        for text in (first, other)
    ]
    return (outputs[0] - outputs[1]).abs().max().item()


print("transformers", transformers.__version__, "torch", torch.__version__)
print("expected: 0 for each model")
as_described = True
for attention in ("sdpa", "eager", "flex_attention"):
    llama = LlamaModel(LlamaConfig(attn_implementation=attention, **sizes, **special_tokens))
    eurobert = EuroBertModel(EuroBertConfig(num_key_value_heads=4, attn_implementation=attention, **sizes, **special_tokens))
    modernbert = ModernBertModel(
        ModernBertConfig(cls_token_id=1, sep_token_id=2, attn_implementation=attention, **sizes, **special_tokens)
    )
    effects = [effect_of_the_first_text(llama, use_cache=False), *map(effect_of_the_first_text, (eurobert, modernbert))]
    print(f"seen: {attention}: Llama {effects[0]:.4f}, EuroBERT {effects[1]:.4f}, ModernBERT {effects[2]:.4f}")
    as_described &= effects[0] < 1e-6 and min(effects[1:]) > 1e-3
sys.exit(not as_described)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/packed.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
