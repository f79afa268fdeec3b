#!/usr/bin/env bash
# Composer 0.32.1: with EMA(half_life="1ep"), saving checkpoints every few batches changes what a run learns.
#
# Expected: how often checkpoints are saved doesn't change the weights, as it doesn't with EMA(half_life="4ba") and four batches an epoch.
# Seen: before a checkpoint is saved, EMA puts its averages into the model and leaves them there until the next batch begins. An average by
# epochs is updated after a checkpoint of the epoch's last batch and before the next batch: model and averages have changed places,
# so the average is left as it is, and the weights that are trained are averaged. Nothing warns. With save_interval="1ep" it's right.
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
cat >"$work/averages.py" <<'PYTHON'
import sys
import tempfile

import composer
import torch
from composer import Trainer
from composer.algorithms import EMA
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset


def trained_weight(half_life, save_interval):
    """One weight after three epochs of four batches: not the average but the one that is trained."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    rows = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    network, average = torch.nn.Linear(4, 2), EMA(half_life=half_life)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=ComposerClassifier(network, num_classes=2),
            optimizers=torch.optim.SGD(network.parameters(), lr=0.5),
            train_dataloader=DataLoader(rows, batch_size=8),
            max_duration="3ep",
            algorithms=[average],
            save_folder=folder if save_interval else None,
            save_interval=save_interval or "1ep",
            device="cpu",
            progress_bar=False,
        ).fit()
    if average.ema_weights_active:  # the last checkpoint left the averages in the model
        return average.ema_model.named_parameters_dict["module.weight"][0, 0].item()
    return network.weight[0, 0].item()


print("composer", composer.__version__)
print("expected: one weight, however often checkpoints are saved")
weights = {
    half_life: [trained_weight(half_life, interval) for interval in (None, "1ep", "4ba", "1ba")]
    for half_life in ("4ba", "1ep")
}
for half_life, (never, epoch, four, each) in weights.items():
    print(
        f"seen: half_life={half_life}: {never:.4f} without checkpoints, {epoch:.4f} with one an epoch, "
        f"{four:.4f} every 4 batches, {each:.4f} every batch"
    )
by_batches, by_epochs = weights.values()
same = max(by_batches) - min(by_batches) < 1e-6 and abs(by_epochs[0] - by_epochs[1]) < 1e-6
sys.exit(not (same and abs(by_epochs[2] - by_epochs[0]) > 0.1 and abs(by_epochs[3] - by_epochs[0]) > 0.1))
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/averages.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
