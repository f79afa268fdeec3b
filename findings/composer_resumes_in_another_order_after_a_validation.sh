#!/usr/bin/env bash
# Composer 0.32.1, torch 2.7.0: a run with validations that resumes within its second epoch trains rows twice and others never.
#
# Expected: a run that is stopped and resumed trains the rows of the undisturbed run, in its order, as it does without validations.
# Seen: with `DataLoader(shuffle=True)`, which Composer accepts on one process, a run that resumes in the second epoch goes on in an order that
# isn't this epoch's: of 40 rows, 10 are trained twice and 10 never. Nothing is logged. A validation's loader draws a number from the
# generator that shuffles the rows; with a `generator` of its own the order is right. So it is if the run resumes in the first epoch or at an
# epoch's end, and with `composer.utils.dist.get_sampler`.
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
cat >"$work/resume_order.py" <<'PYTHON'
import sys
import tempfile
from collections import Counter
from importlib.metadata import version

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

ROWS = TensorDataset(torch.arange(40.0)[:, None])


class Model(ComposerModel):
    """Records the rows of each batch that it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.batches = torch.nn.Linear(1, 1), []

    def forward(self, batch):
        if self.training:
            self.batches.append([int(row) for row in batch[0]])
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return 1e-4 * outputs.square().mean()

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def get_metrics(self, is_train):
        return {}


def train(folder, until, validated, sampler, generator=None):
    """Train up to a batch, from the newest checkpoint of the folder, and return the rows of each batch."""
    model = Model()
    order = {"sampler": dist.get_sampler(ROWS, shuffle=True)} if sampler else {"shuffle": True}
    validation = {"eval_dataloader": DataLoader(ROWS, batch_size=8, generator=generator), "eval_interval": "5ba"} if validated else {}
    Trainer(
        model=model, train_dataloader=DataLoader(ROWS, batch_size=4, **order), max_duration=f"{until}ba", seed=3, device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01), progress_bar=False, save_folder=folder, save_interval="1ba",
        save_num_checkpoints_to_keep=-1, autoresume=True, run_name="order", **validation,
    ).fit()
    return model.batches


def resumed(stop, validated=True, sampler=False, generator=None):
    """Compare a run of two epochs, stopped at a batch, with the undisturbed run; count rows of the second epoch."""
    undisturbed = train(tempfile.mkdtemp(), 20, validated, sampler, generator)
    folder = tempfile.mkdtemp()
    batches = [batch for until in (stop, 20) for batch in train(folder, until, validated, sampler, generator)]
    counts = Counter(row for batch in batches[10:] for row in batch)
    return batches == undisturbed, sum(count > 1 for count in counts.values()), 40 - len(counts)


print(*(f"{name} {version(name)}" for name in ("mosaicml", "torch")))
print("expected: the order of the undisturbed run, each row once in the second epoch")
cases = {
    "with validations, resumed at batch 14 of 20": resumed(14),
    "resumed at batch 4": resumed(4),
    "resumed at batch 10, the end of the first epoch": resumed(10),
    "resumed at batch 14, without validations": resumed(14, validated=False),
    "resumed at batch 14, with Composer's sampler": resumed(14, sampler=True),
    "resumed at batch 14, the validation's loader with a generator": resumed(14, generator=torch.Generator()),
}
for name, (same, twice, never) in cases.items():
    print(f"seen: {name}: {'the same order' if same else 'another order'}; {twice} rows twice, {never} never")
first, *others = cases.values()
sys.exit(not (not first[0] and first[1:] == (10, 10) and others == [(True, 0, 0)] * 5))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resume_order.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
