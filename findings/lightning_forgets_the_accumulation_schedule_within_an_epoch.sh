#!/usr/bin/env bash
# lightning 2.6.6: a run that resumes within an epoch ignores the gradient accumulation that its schedule sets for this epoch.
#
# Expected: with GradientAccumulationScheduler({0: 1, 1: 2}) a resumed run accumulates two batches in the second epoch, as the undisturbed one.
# Seen: the schedule is applied when an epoch begins. A run that resumes within the second epoch makes an update for each batch until the
# third begins, and ends at step 18 in place of 16, with other weights. From a checkpoint of the first epoch it is right.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 torch==2.11.0 torchdata==0.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/accumulation.py" <<'PYTHON'
import logging
import os
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder, resume_from=None):
    model = Line()
    data = TensorDataset(torch.arange(32), torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[save, GradientAccumulationScheduler({0: 1, 1: 2})],
    )
    trainer.fit(model, StatefulDataLoader(data, batch_size=4), ckpt_path=resume_from)
    return trainer.global_step, torch.cat([weight.detach().flatten() for weight in model.parameters()])


print("lightning", lightning.__version__)
with tempfile.TemporaryDirectory() as folder:
    steps, weights = train(folder)
    print(f"expected: {steps} steps and the same weights, as the undisturbed run: 8 steps in the first epoch, then 4 in each")
    seen = {}
    for step in (4, 10):
        last, resumed = train(folder + "/more", f"{folder}/step={step}.ckpt")
        seen[step] = last, float((resumed - weights).abs().max())
        print(f"seen: resumed at step {step}: {last} steps, weights differ by {seen[step][1]:.1e}")
raise SystemExit(0 if steps == 16 and seen[4] == (16, 0.0) and seen[10][0] == 18 and seen[10][1] > 1e-4 else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/accumulation.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
