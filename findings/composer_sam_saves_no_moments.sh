#!/usr/bin/env bash
# Composer 0.32.1: with the SAM algorithm, a checkpoint has none of the optimizer's moments, and a run that resumes starts AdamW anew.
#
# SAM puts its own optimizer around the one that was given, and only the outer one is saved: its states are the last perturbations. The
# moments and steps of AdamW are in no checkpoint. The run resumes without an error, and ends with other weights than the undisturbed
# run. Without SAM, the same run resumes bit for bit.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
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
cat >"$work/sam_checkpoint.py" <<'PYTHON'
import glob
import warnings

import torch
from composer import Trainer
from composer.algorithms import SAM
from composer.models import ComposerModel
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).pow(2).mean()


def train(algorithms, folder=None, load=None):
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    model = Regression()
    trainer = Trainer(
        model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2), train_dataloader=DataLoader(rows, batch_size=8),
        max_duration="16ba", algorithms=algorithms, device="cpu", seed=3, progress_bar=False, loggers=[],
        save_folder=folder, save_interval="8ba", load_path=load,
    )
    trainer.fit()
    trainer.close()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


differences = {}
for name, algorithms in (("without an algorithm", []), ("with SAM", [SAM()])):
    undisturbed = train(algorithms, folder=name)
    [file] = glob.glob(f"{name}/*-ba8-rank0.pt")
    [(optimizer, saved)] = torch.load(file, weights_only=False)["state"]["optimizers"].items()
    keys = {str(key) for state in saved["state"].values() for key in state}
    resumed = train([SAM()] if algorithms else [], load=file)
    differences[name] = (resumed - undisturbed).abs().max().item()
    print(f"{name}: the checkpoint's {optimizer} has {sorted(keys)}; after the resumed run the largest difference of a weight is {differences[name]:.4f}")
    assert ("exp_avg" in keys) == ("step" in keys) == (not algorithms)
assert differences["without an algorithm"] == 0 and differences["with SAM"] > 1e-3
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/sam_checkpoint.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
