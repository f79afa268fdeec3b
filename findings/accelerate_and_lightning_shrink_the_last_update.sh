#!/usr/bin/env bash
# accelerate 1.15.0, lightning 2.6.6: with gradient accumulation, the last update of an epoch has a fraction of the gradient.
#
# Expected: an update's gradient is the mean over the batches that it accumulates, however many are left at the end of an epoch.
# Seen: both divide each batch's loss by the configured number. Of nine batches, accumulated by four, the last update has one batch and a quarter
# of its gradient: a quarter of the step with SGD, and under a fixed limit of the gradient's norm, or a fixed loss scale, another
# relation than all others. An epoch shorter than the accumulation trains at a fraction throughout. Nothing warns.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(accelerate==1.15.0 lightning==2.6.6 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/accumulation.py" <<'PYTHON'
import sys
import warnings

import accelerate
import lightning
import torch
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
rows = DataLoader(torch.ones(18, 1), batch_size=2)


def with_accelerate():
    """The gradient of each update: 1 for each batch."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    layer = torch.nn.Linear(1, 1, bias=False)
    layer, optimizer, batches = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0), rows)
    seen = []
    for batch in batches:
        with accelerator.accumulate(layer):
            accelerator.backward(layer(batch).mean())
            if accelerator.sync_gradients:
                seen.append(layer.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1, bias=False), []

    def training_step(self, batch, number):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.layer.weight.grad.item())


def with_lightning():
    model = Model()
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, accelerator="cpu", **off).fit(model, rows)
    return model.seen


print("accelerate", accelerate.__version__, "lightning", lightning.__version__)
print("expected: each batch has the gradient 1, and so has each of three updates, of 4, 4 and 1 batches")
seen = {"accelerate": with_accelerate(), "lightning": with_lightning()}
for name, gradients in seen.items():
    print(f"seen: {name}: {', '.join(f'{gradient:g}' for gradient in gradients)}")
sys.exit(not all(gradients == [1.0, 1.0, 0.25] for gradients in seen.values()))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/accumulation.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
