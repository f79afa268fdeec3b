#!/usr/bin/env bash
# transformers 5.23.0: with label_smoothing_factor, Trainer trains a subclass of LlamaForCausalLM to repeat its input.
#
# Expected: label smoothing changes the loss a little, for each causal language model alike: position i predicts token i + 1, as without it.
# Seen: with label smoothing Trainer computes the loss itself, and shifts the labels only if the name of the model's class is in a list of its
# own. Any other name, be it a class without changes that inherits from LlamaForCausalLM or one from a model folder's own code, is
# trained to predict the token that it reads: the loss falls to a fifth, all tokens are copied, and the model's own loss is that of a
# bad guess. Nothing warns. Without label smoothing both classes train alike.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 accelerate==1.15.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/smoothing.py" <<'PYTHON'
import sys
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments


class OwnModel(LlamaForCausalLM):
    """The same model under another name."""


config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
torch.manual_seed(0)
input_ids = torch.randint(1, 64, (256, 32))
rows = [{"input_ids": row, "labels": row} for row in input_ids]


def train(kind, smoothing):
    """Loss and share of copied tokens."""
    torch.manual_seed(0)
    model = kind(config)
    with tempfile.TemporaryDirectory() as folder:
        options = dict(
            max_steps=150,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            label_smoothing_factor=smoothing,
            report_to=[],
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with torch.no_grad():
        outputs = model.eval()(input_ids=input_ids, labels=input_ids)
    copied = (outputs.logits.argmax(-1) == input_ids).float().mean().item()
    return float(trainer.state.log_history[-2]["loss"]), copied, outputs.loss.item()


print("transformers", transformers.__version__)
print("expected: both classes train alike, with and without label smoothing")
kinds = LlamaForCausalLM, OwnModel
seen = {(kind.__name__, smoothing): train(kind, smoothing) for kind in kinds for smoothing in (0.0, 0.1)}
for (name, smoothing), (loss, copied, own) in seen.items():
    print(
        f"seen: {name}, label_smoothing_factor={smoothing}: Trainer's loss {loss:.2f}, tokens copied {copied:.0%}, "
        f"the model's own loss {own:.2f}"
    )
*right, wrong = seen.values()
sys.exit(not (all(copied < 0.1 for _, copied, _ in right) and wrong[1] > 0.9 and wrong[0] < 1.0 and wrong[2] > 5))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/smoothing.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
