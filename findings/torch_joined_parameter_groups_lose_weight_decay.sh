#!/usr/bin/env bash
# torch 2.7.0, Composer 0.32.1: a run that resumes with one parameter group in place of two trains without weight decay.
#
# Expected: a checkpoint of an optimizer with two groups, weights with a weight decay of 0.1 and biases without, is refused by an optimizer with
# one group (PyTorch's own `load_state_dict` does so), or leaves that group's weight decay at 0.1.
# Seen: `set_optimizer_state_dict` (torch.distributed.checkpoint) finds parameters by name, and gives the one group the settings of the
# checkpoint's last group that has a parameter of it: weight decay 0.0 for all, without a message. With the biases' group first it is 0.1.
# Composer loads optimizers so. torch 2.15.0 does the same.
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
cat >"$work/joined_groups.py" <<'PYTHON'
import copy
import sys
import tempfile
from importlib.metadata import version

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import DataLoader

ROWS = [torch.randn(8, generator=torch.Generator().manual_seed(row)) for row in range(64)]


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def optimizer_of(model, groups):
    weights, biases = [model.layer.weight], [model.layer.bias]
    decayed, others = {"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}
    parts = {"weights, biases": [decayed, others], "biases, weights": [others, decayed], "one group": [{"params": weights + biases}]}
    return torch.optim.AdamW(parts[groups], lr=0.01, weight_decay=0.1)


def loaded(first, second, load):
    """Save an optimizer with groups `first` after a step, and load it into one with groups `second`."""
    model = Model()
    optimizer = optimizer_of(model, first)
    model(ROWS[0]).sum().backward()
    optimizer.step()
    other = Model()
    result = optimizer_of(other, second)
    try:
        load(model, optimizer, other, result)
    except (ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return [group["weight_decay"] for group in result.param_groups]


def by_name(model, optimizer, other, result):
    set_optimizer_state_dict(other, result, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))


def by_order(model, optimizer, other, result):
    result.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def with_composer(first, second):
    folder = tempfile.mkdtemp()
    for groups, until in ((first, "2ba"), (second, "4ba")):
        model = Model()
        optimizer = optimizer_of(model, groups)
        Trainer(
            model=model, train_dataloader=DataLoader(ROWS, batch_size=16), max_duration=until, optimizers=optimizer, device="cpu",
            progress_bar=False, save_folder=folder, save_interval="2ba", autoresume=True, run_name="joined",
        ).fit()
    return [group["weight_decay"] for group in optimizer.param_groups]


print(*(f"{name} {version(name)}" for name in ("torch", "mosaicml")))
print("expected: one group, loaded from two, is refused or has weight decay 0.1")
own = loaded("weights, biases", "one group", by_order)
seen = {first: loaded(first, "one group", by_name) for first in ("weights, biases", "biases, weights")}
print(f"seen: load_state_dict: {own}")
for first, decays in seen.items():
    print(f"seen: set_optimizer_state_dict, saved with groups of {first}: weight decay {decays}")
resumed = with_composer("weights, biases", "one group")
print(f"seen: Composer, saved with groups of weights, biases, and resumed: weight decay {resumed}")
same = loaded("weights, biases", "weights, biases", by_name), loaded("weights, biases", "biases, weights", by_name)
print(f"seen: set_optimizer_state_dict, into the same two groups: {same[0]}, and into the two in the other order: {same[1]}")
as_described = seen == {"weights, biases": [0.0], "biases, weights": [0.1]} and resumed == [0.0] and own.startswith("ValueError")
sys.exit(not (as_described and same == ([0.1, 0.0], [0.0, 0.1])))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/joined_groups.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
