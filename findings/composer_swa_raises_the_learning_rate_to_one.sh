#!/usr/bin/env bash
# Composer 0.32.1: SWA(schedule_swa_lr=True, swa_lr=0.01) anneals the learning rate to 1.0, whatever swa_lr says.
#
# Expected: while weights are averaged, the optimizer's learning rate goes to swa_lr, "the final learning rate to anneal towards".
# Seen: SWA replaces swa_lr, when training begins and again when averaging does, by the last learning rate of Composer's scheduler. Without a
# scheduler that is 1.0, and so is the multiplier of a scheduler that keeps the rate: from an optimizer's rate of 0.1 it rises
# tenfold within four batches, and from 1e-4 it would ten-thousandfold. swa_lr=0.01 and swa_lr=0.5 train alike. Nothing warns of it.
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
from torch.utils.data import DataLoader, TensorDataset


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return outputs.square().mean()


def rates(swa_lr):
    """The learning rate of each batch."""
    seen, model = [], Model()

    class Rates(Callback):
        def batch_start(self, state, logger):
            seen.append(round(state.optimizers[0].param_groups[0]["lr"], 3))

    Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2),
        max_duration="5ep",
        algorithms=[SWA("2ep", "4ep", "1ba", schedule_swa_lr=True, swa_lr=swa_lr, anneal_steps=4)],
        callbacks=[Rates()],
        device="cpu",
        progress_bar=False,
    ).fit()
    return seen


print("composer", composer.__version__)
print("expected: from 0.1 to 0.01, and from 0.1 to 0.5")
low, high = rates(0.01), rates(0.5)
for swa_lr, seen in ((0.01, low), (0.5, high)):
    print(f"seen: swa_lr={swa_lr}: {', '.join(f'{rate:g}' for rate in seen)}")
sys.exit(not (low == high and low[0] == 0.1 and low[-1] == 1.0))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/averaging.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
