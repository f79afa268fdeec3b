#!/usr/bin/env bash
# transformers 5.23.0: with auto_find_batch_size, the updates of attempts that ran out of memory stay in the model.
#
# Expected: after an attempt fails, training begins anew with a smaller batch: max_steps=16 trains 16 updates, whether or not an
# attempt failed before. Here each update adds -1 to the weight, and one long row in 64 doesn't fit if its batch has more than 4 rows.
# Seen: the weights (and the optimizer's state) are those that the failed attempts have trained, while step, schedule and order of rows begin
# anew: 47 updates in the weight after 16 steps. global_step says 16. The later the long row comes, the more is trained twice; a
# learning rate that starts high again meets weights that are trained. Nothing warns of it.
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
cat >"$work/batches.py" <<'PYTHON'
import sys
import tempfile

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainingArguments


class Model(torch.nn.Module):
    """Each update with SGD at a rate of 1 adds -1 to its weight. Long rows need much memory."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, length):
        if length.max() > 1 and len(length) > 4:
            torch.empty(len(length), 2**50)  # more than any machine has
        return {"loss": self.weight * 1.0}


rows = [{"length": 1 + (row == 40)} for row in range(64)]


def train(batch_size, auto):
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=16, per_device_train_batch_size=batch_size, auto_find_batch_size=auto, optim="sgd",
            learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.state.global_step, round(-model.weight.item())


print("transformers", transformers.__version__)
print("expected: 16 steps and 16 updates in the weight, both ways")
fits, found = train(4, False), train(8, True)
print(f"seen: batches of 4 from the start: {fits[0]} steps, {fits[1]} updates")
print(f"seen: auto_find_batch_size from 8: {found[0]} steps, {found[1]} updates")
sys.exit(not (fits == (16, 16) and found[0] == 16 and found[1] > 20))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/batches.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
