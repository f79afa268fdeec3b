#!/usr/bin/env bash
# transformers 5.23.0: Trainer gives classifiers gradients times the number of accumulation steps, and times the number of processes.
#
# Expected: eight texts in one batch, as four microbatches of two, or on two processes have the same loss and the same gradient.
# Seen: both are 4 times as large in four microbatches for BERT's, EuroBERT's and ModernBERT's classifiers of texts and tokens and BERT's
# masked language model, and twice as large on two processes (EuroBERT's run here). Trainer leaves the division by the steps to each
# model whose forward takes **kwargs, and multiplies its loss by the processes, as if it were a sum over its share of all labels. These
# classes take **kwargs, but compute a mean over the microbatch. Masked language models of EuroBERT and ModernBERT divide by the
# number of masked tokens that Trainer gives them, and are right. Nothing warns; with the default max_grad_norm=1.0, gradients are
# clipped more. model.accepts_loss_kwargs = False, which Trainer asks first, gives equal gradients.
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
cat >"$work/accumulation.py" <<'PYTHON'
import os
import subprocess
import sys
import tempfile

import torch
import transformers
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    EuroBertConfig,
    ModernBertConfig,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

transformers.utils.logging.set_verbosity_error()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
special_tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
configs = {
    "BERT": BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes, **special_tokens),
    "EuroBERT": EuroBertConfig(num_key_value_heads=2, **sizes, **special_tokens),
    "ModernBERT": ModernBertConfig(cls_token_id=1, sep_token_id=2, **sizes, **special_tokens),
}
torch.manual_seed(0)
input_ids = torch.randint(3, 64, (8, 10))
kinds = {
    "texts": (AutoModelForSequenceClassification, input_ids[:, 0] % 3),
    "tokens": (AutoModelForTokenClassification, input_ids % 3),
    "masked language model": (AutoModelForMaskedLM, input_ids),
}


def loss_and_gradient(config, auto_class, labels, steps=1, divided_by_trainer=False):
    """The first logged loss and gradient norm of eight rows in `steps` microbatches, or on the processes that torchrun started."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(1)
    model = auto_class.from_config(config)
    if divided_by_trainer:
        model.accepts_loss_kwargs = False
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label} for ids, label in zip(input_ids, labels)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8 // steps // processes, gradient_accumulation_steps=steps,
            max_steps=1, logging_steps=1, max_grad_norm=1e9, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            ddp_backend="gloo" if processes > 1 else None,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log = trainer.state.log_history[0]
    return float(log["loss"]), float(log["grad_norm"])


if "RANK" in os.environ:  # started below
    for auto_class, labels in kinds.values():
        loss, gradient = loss_and_gradient(configs["EuroBERT"], auto_class, labels)
        if os.environ["RANK"] == "0":
            print(loss, gradient, flush=True)
    sys.exit()
print("transformers", transformers.__version__, "torch", torch.__version__)
print("expected: the same loss and gradient norm with 1 and 4 accumulation steps, and on 1 and 2 processes")
as_described = True
for divided_by_trainer in (False, True):
    for name, config in configs.items():
        for kind, (auto_class, labels) in kinds.items():
            one, four = (loss_and_gradient(config, auto_class, labels, steps, divided_by_trainer) for steps in (1, 4))
            ratio = four[1] / one[1]
            setting = ", accepts_loss_kwargs = False" if divided_by_trainer else ""
            print(
                f"seen: {name}, {kind}{setting}: loss {one[0]:.3f} and {four[0]:.3f}, "
                f"gradient {one[1]:.3f} and {four[1]:.3f}"
            )
            is_right = divided_by_trainer or (kind == "masked language model" and name != "BERT")
            as_described &= abs(ratio - (1 if is_right else 4)) < 1e-3
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
for (kind, (auto_class, labels)), line in zip(kinds.items(), lines):
    one, two = loss_and_gradient(configs["EuroBERT"], auto_class, labels), tuple(map(float, line.split()))
    print(f"seen: EuroBERT, {kind}, on 1 and 2 processes: loss {one[0]:.3f} and {two[0]:.3f}, gradient {one[1]:.3f} and {two[1]:.3f}")
    as_described &= abs(two[1] / one[1] - (1 if kind == "masked language model" else 2)) < 1e-3
sys.exit(not (as_described and len(lines) == 3))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/accumulation.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
