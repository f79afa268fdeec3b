#!/usr/bin/env bash
# Composer 0.32.1: HuggingFaceModel moves a causal model's labels within the batch, so that a second evaluation has another loss.
#
# Expected: evaluating an unchanged model twice on the same batches gives the same loss.
# Seen: eval_forward writes the shifted labels into the tensor of the batch. If a loader hands out batches that exist already
# (DataLoader(batches, batch_size=None), or a list), each evaluation on a CPU shifts the labels once more, and the loss is that of the
# next but one token. Nothing warns. A collate function that stacks rows makes new tensors, and isn't affected; nor should be a GPU, to which
# batches are copied.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mosaicml==0.32.1 transformers==4.57.6 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/evaluations.py" <<'PYTHON'
import sys

import composer
import torch
import transformers
from composer import Evaluator, Trainer
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def losses(dataset, **options):
    """Three evaluations of one model."""
    torch.manual_seed(0)
    model = HuggingFaceModel(
        LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)), eval_metrics=[LanguageCrossEntropy()], use_logits=True
    )
    evaluator = Evaluator(label="validation", dataloader=DataLoader(dataset, **options), device_eval_microbatch_size=2)
    trainer = Trainer(model=model, eval_dataloader=evaluator, device="cpu", progress_bar=False)
    found = []
    for _ in range(3):
        trainer.eval()
        found.append(trainer.state.eval_metrics["validation"]["LanguageCrossEntropy"].compute().item())
    return found


torch.manual_seed(1)
tokens = torch.randint(3, 64, (6, 8))
rows = [{"input_ids": row, "labels": row} for row in tokens]
batches = [{"input_ids": pair, "labels": pair.clone()} for pair in tokens.split(2)]
print("composer", composer.__version__, "transformers", transformers.__version__)
print("expected: one loss")
stacked, prepared = losses(rows, batch_size=2), losses(batches, batch_size=None)
print("seen: rows, stacked by the loader:", *(f"{loss:.4f}" for loss in stacked))
print("seen: prepared batches:           ", *(f"{loss:.4f}" for loss in prepared))
sys.exit(not (len(set(stacked)) == 1 and prepared[0] == stacked[0] and len(set(prepared)) == 3))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/evaluations.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
