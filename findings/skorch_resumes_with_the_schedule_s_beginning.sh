#!/usr/bin/env bash
# skorch 1.4.0: a training that continues from its Checkpoint begins its learning-rate schedule anew.
#
# Expected: `Checkpoint` keeps weights, optimizer and history, and `LoadInitState` continues from them with the learning rates of the undisturbed
# training: its history is kept, and the optimizer's rate and momentum are.
# Seen: the LRScheduler isn't saved. A linear decay from 0.1 jumps from 0.05 back to 0.083; StepLR and CosineAnnealingLR count from 0, on top of the
# rate that the optimizer had.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(skorch==1.4.0 torch==2.11.0 numpy==2.3.5 scikit-learn==1.8.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/rates.py" <<'PYTHON'
import tempfile
import warnings

import numpy as np
import skorch
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback, Checkpoint, LoadInitState, LRScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

warnings.simplefilter("ignore")
inputs = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
targets = inputs.sum(1, keepdims=True)
SCHEDULES = {
    "LambdaLR": {"policy": LambdaLR, "lr_lambda": lambda epoch: 1 - epoch / 6},
    "StepLR": {"policy": StepLR, "step_size": 2, "gamma": 0.5},
    "CosineAnnealingLR": {"policy": CosineAnnealingLR, "T_max": 6},
}


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, values):
        return self.layer(values)


class Rates(Callback):
    def initialize(self):
        self.seen = []
        return self

    def on_epoch_begin(self, net, **_):
        self.seen.append(round(net.optimizer_.param_groups[0]["lr"], 4))


def train(folder, schedule, epochs, resume=False):
    save, rates = Checkpoint(dirname=folder, monitor=None), Rates()
    callbacks = [("schedule", LRScheduler(**SCHEDULES[schedule])), ("rates", rates), ("save", save)]
    if resume:
        callbacks.append(("load", LoadInitState(save)))
    net = NeuralNetRegressor(
        Line, max_epochs=epochs, lr=0.1, optimizer=torch.optim.SGD, optimizer__momentum=0.9, callbacks=callbacks, train_split=None,
        iterator_train__shuffle=False, verbose=0,
    )
    net.fit(inputs, targets)
    return rates.seen, len(net.history)


print("skorch", skorch.__version__)
for schedule in SCHEDULES:
    with tempfile.TemporaryDirectory() as work:
        whole, _ = train(f"{work}/whole", schedule, 6)
        first, _ = train(f"{work}/parts", schedule, 3)
        second, epochs = train(f"{work}/parts", schedule, 3, resume=True)
        print(f"{schedule}: undisturbed {whole}; in two parts: expected {whole[3:]}, seen {second}")
        assert first == whole[:3] and epochs == 6 and second[0] == whole[3] and second != whole[3:]
        if schedule == "LambdaLR":
            assert second[1:] == whole[1:3]
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/rates.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
