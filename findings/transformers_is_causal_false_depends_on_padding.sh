#!/usr/bin/env bash
# transformers 5.23.0: with is_causal=False, StableLM and Nemotron see later tokens only if some text of the batch is padded.
#
# Expected: `is_causal=False` in a decoder's configuration lets each position attend to the whole text, as it does for Llama, whatever else is
# in the batch.
# Seen: with sdpa, transformers' choice, StableLM and Nemotron stay causal in a batch without padding, and become bidirectional in one
# with padding, so that a text's hidden states depend on the length of other texts. With eager attention they are always bidirectional. Without
# padding no mask is made, and the attention of these two then asks for a causal one by itself, whatever the configuration says. Nothing warns.
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
cat >"$work/masks.py" <<'PYTHON'
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
print("expected: the last token changes the first position's hidden state, with and without padding in the batch")
size = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
changes = {}
for family in ("llama", "stablelm", "nemotron"):
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **size, is_causal=False)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval()
        tokens = torch.arange(1, 13).repeat(2, 1)
        other = tokens.clone()
        other[0, -1] = 40  # of the first text, which is never padded
        full, padded = torch.ones_like(tokens), torch.ones_like(tokens)
        padded[1, 8:] = 0  # the second text is shorter
        for name, mask in (("no padding", full), ("padding in the other text", padded)):
            with torch.no_grad():
                first, changed = (model(ids, attention_mask=mask).last_hidden_state[0, 0] for ids in (tokens, other))
            changes[family, attention, name] = float((first - changed).abs().max())
            print(f"seen: {family}, {attention}, {name}: changed by {changes[family, attention, name]:.1e}")
causal = {key for key, change in changes.items() if change == 0}
expected = {(family, "sdpa", "no padding") for family in ("stablelm", "nemotron")}
raise SystemExit(0 if causal == expected and all(changes[key] > 1e-4 for key in changes.keys() - expected) else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/masks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
