#!/usr/bin/env bash
# Composer 0.32.1: a run that resumes forgets how long its EarlyStopper has waited, and the best value that it has seen.
#
# Expected: a resumed run stops where the undisturbed run stops, since checkpoints hold the states of callbacks.
# Seen: EarlyStopper saves no state. After a resume the first value is the best one, even if it is the worst so far, and the patience
# begins anew. Here the metric never improves and the patience is three epochs: the undisturbed run ends after five epochs, and one that is
# interrupted every three epochs trains all 30. Nothing warns. A run on machines that are preempted stops later, or never.
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
cat >"$work/patience.py" <<'PYTHON'
import sys
import tempfile

import composer
import torch
from composer import Trainer
from composer.callbacks import EarlyStopper
from composer.models import ComposerModel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

rows = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)


class Model(ComposerModel):
    """Its validation loss is 1 at all times."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return self.weight

    def loss(self, outputs, batch):
        return outputs.sum()

    def get_metrics(self, is_train=False):
        return {"val_loss": MeanMetric()}

    def update_metric(self, batch, outputs, metric):
        metric.update(1.0)


def epochs_until_stopped(interval):
    """The epochs that are trained, of 30, by a run that starts again after each `interval` epochs."""
    trained, checkpoint = 0, None
    with tempfile.TemporaryDirectory() as folder:
        while trained < 30:
            trainer = Trainer(
                model=Model(),
                train_dataloader=rows,
                eval_dataloader=rows,
                max_duration="30ep",
                callbacks=[EarlyStopper("val_loss", "eval", patience="3ep")],
                save_folder=folder,
                save_interval="1ep",
                load_path=checkpoint,
                device="cpu",
                progress_bar=False,
            )
            trainer.fit(duration=f"{interval}ep")
            before, trained = trained, trainer.state.timestamp.epoch.value
            trainer.close()
            if trained < before + interval:
                break
            checkpoint = f"{folder}/ep{trained}-ba{2 * trained}-rank0.pt"
    return trained


print("composer", composer.__version__)
print("expected: the same number of epochs, interrupted or not")
undisturbed, interrupted = epochs_until_stopped(30), epochs_until_stopped(3)
print(f"seen: {undisturbed} epochs, and {interrupted} if the run starts again after every three")
sys.exit(not (undisturbed == 5 and interrupted == 30))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/patience.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
