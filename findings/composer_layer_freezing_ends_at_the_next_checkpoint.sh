#!/usr/bin/env bash
# Composer 0.32.1: a run with LayerFreezing ends at the first checkpoint after a layer was frozen.
#
# Expected: the algorithm LayerFreezing, whose frozen layers aren't trained any more, and checkpoints after each epoch go together.
# Seen: it takes frozen weights out of the optimizer's groups and leaves their moments, so the optimizer's state can't be made: KeyError with an
# address of memory for a key. Without checkpoints the same run trains to its end.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mosaicml==0.32.1 torch==2.7.0 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/freezing.py" <<'PYTHON'
import tempfile
import warnings
from importlib.metadata import version

import torch
from composer import Trainer
from composer.algorithms import LayerFreezing
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
print("Composer", version("mosaicml"), "torch", torch.__version__)


def train(folder):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    inputs = torch.randn(64, 4)
    trainer = Trainer(
        model=ComposerClassifier(network, num_classes=2),
        optimizers=torch.optim.AdamW(network.parameters(), lr=0.01),
        train_dataloader=DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8),
        max_duration="4ep",
        algorithms=[LayerFreezing(freeze_start=0.25, freeze_level=1.0)],
        save_folder=folder,
        save_interval="1ep",
        progress_bar=False,
        device="cpu",
    )
    try:
        trainer.fit()
        error = None
    except KeyError as raised:
        error = raised
    return int(trainer.state.timestamp.epoch), error


print("expected: 4 epochs, with and without checkpoints")
epochs, error = train(None)
print(f"without checkpoints: {epochs} epochs, error {error!r}")
assert epochs == 4 and error is None
with tempfile.TemporaryDirectory() as folder:
    epochs, error = train(folder)
print(f"with checkpoints: {epochs} epochs, error {type(error).__name__}({'a number' if error and isinstance(error.args[0], int) else error})")
assert epochs < 4 and error is not None and isinstance(error.args[0], int)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/freezing.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
