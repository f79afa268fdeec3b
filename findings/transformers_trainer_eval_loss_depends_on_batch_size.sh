#!/usr/bin/env bash
# transformers 5.23.0: Trainer's eval_loss of a language model depends on per_device_eval_batch_size.
#
# Expected: eval_loss is the mean over the labelled tokens of the evaluation set, and exp(eval_loss) its perplexity, whatever the batch size.
# Seen: it is a mean over rows of the means over their batches' tokens. Texts of other lengths, or rows with other numbers of masked tokens, so
# weigh differently in each batch size: here the same decoder has four losses with four batch sizes. With all rows in one batch it is the mean
# over tokens. The training loss is normalized by tokens across a batch's microbatches; only the evaluation isn't.
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
cat >"$work/eval_loss.py" <<'PYTHON'
import sys
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

transformers.utils.logging.set_verbosity_error()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes))
texts = [torch.randint(3, 64, (length,)) for length in (60, 3, 4, 5, 40, 33, 21, 50)]


def collate(batch):
    padded = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": padded.masked_fill(padded == 0, -100)}


def eval_loss(batch_size):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(model, arguments, data_collator=collate, eval_dataset=[{"input_ids": text} for text in texts])
        trainer.remove_callback(PrinterCallback)
        return trainer.evaluate()["eval_loss"]


with torch.no_grad():
    of_texts = [torch.nn.functional.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum") for text in texts]
mean = (sum(of_texts) / sum(len(text) - 1 for text in texts)).item()
print("transformers", transformers.__version__, "torch", torch.__version__)
print(f"expected: {mean:.4f}, the mean over tokens, with each batch size")
seen = {batch_size: eval_loss(batch_size) for batch_size in (1, 2, 4, 8)}
print("seen:", ", ".join(f"{loss:.4f} with {batch_size}" for batch_size, loss in seen.items()))
others = [loss for batch_size, loss in seen.items() if batch_size < 8]
sys.exit(not (abs(seen[8] - mean) < 1e-4 and all(abs(loss - mean) > 1e-2 for loss in others) and len(set(others)) == 3))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/eval_loss.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
