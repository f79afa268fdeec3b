#!/usr/bin/env bash
# Composer 0.32.1: SWA(schedule_swa_lr=True, swa_lr=0.01) doesn't use swa_lr; without a scheduler the learning rate goes to 1.0.
#
# Expected: while weights are averaged, the optimizer's learning rate goes to swa_lr, "the final learning rate to anneal towards".
# Seen: SWA replaces swa_lr by the last learning rate of the Trainer's scheduler. Without a scheduler it takes 1.0: from an optimizer's rate of
# 0.1, or of 0.0001, the rate rises to 1.0 within four batches. With a scheduler that keeps the rate, it stays as it is. swa_lr=0.01
# and swa_lr=0.5 train alike. Nothing warns of it.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mosaicml==0.32.1 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/averaging.py" <<'PYTHON'
import sys

import composer
import torch
from composer import Callback, Trainer
from composer.algorithms import SWA
from composer.models import ComposerModel
from composer.optim import ConstantScheduler
from torch.utils.data import DataLoader, TensorDataset


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return outputs.square().mean()


def rates(lr, swa_lr, scheduler=None):
    """The learning rate of each batch, from `lr` on."""
    seen, model = [], Model()

    class Rates(Callback):
        def batch_start(self, state, logger):
            seen.append(round(state.optimizers[0].param_groups[0]["lr"], 4))

    Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        schedulers=scheduler,
        train_dataloader=DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2),
        max_duration="5ep",
        algorithms=[SWA("2ep", "4ep", "1ba", schedule_swa_lr=True, swa_lr=swa_lr, anneal_steps=4)],
        callbacks=[Rates()],
        device="cpu",
        progress_bar=False,
    ).fit()
    return seen


print("composer", composer.__version__)
print("expected: the last rates are 0.01 and 0.5, from 0.1 on")
low, high = rates(0.1, 0.01), rates(0.1, 0.5)
kept = [rates(0.1, swa_lr, ConstantScheduler()) for swa_lr in (0.01, 0.5)]
small = rates(0.0001, 0.01)
for described, seen in (
    ("swa_lr=0.01", low),
    ("swa_lr=0.5", high),
    ("swa_lr=0.01, from 0.0001 on", small),
    ("swa_lr=0.01, with a ConstantScheduler", kept[0]),
    ("swa_lr=0.5, with a ConstantScheduler", kept[1]),
):
    print(f"seen: {described}: {', '.join(f'{rate:g}' for rate in seen)}")
without = low == high and low[0] == 0.1 and small[0] == 0.0001 and low[-1] == small[-1] == 1.0
sys.exit(not (without and all(set(seen) == {0.1} for seen in kept)))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/averaging.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
