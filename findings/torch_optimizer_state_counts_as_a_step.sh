#!/usr/bin/env bash
# torch 2.7.0, Composer 0.32.1: saving a checkpoint before the first step changes the training.
#
# Expected: reading a new optimizer's state for a checkpoint changes nothing: the run goes on as one that wasn't saved.
# Seen: `get_optimizer_state_dict` (torch.distributed.checkpoint) takes a step with zero gradients and a learning rate of 0, so that there is
# a state to return, and leaves it: AdamW's count is 1, so that the first real update is corrected for bias as a second one (0.0074
# instead of 0.01 for a learning rate of 0.01), and SGD with momentum and weight decay begins with a momentum. The later weights differ.
# Composer's `save_checkpoint` before `fit` does the same. After the first step nothing changes. torch 2.11.0 and 2.15.0 do the same.
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
cat >"$work/saved_first.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0),
    "SGD with momentum and weight decay": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=0.1),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
}
generator = torch.Generator().manual_seed(1)
DATA = [(torch.randn(8, generator=generator), torch.randn(4, generator=generator)) for _ in range(80)]


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()


def train(build, read_at):
    """Train five batches; read the optimizer's state before one of them. Return the first update and the last weights."""
    model = Model()
    optimizer = build(model.parameters())
    begin, first = model.layer.weight.detach().clone(), None
    for step, batch in enumerate(DataLoader(DATA, batch_size=16)):
        if step == read_at:
            get_optimizer_state_dict(model, optimizer)
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
        first = (model.layer.weight - begin).abs().mean().item() if first is None else first
    return first, model.layer.weight.detach()


def train_with_composer(save_first):
    model = Model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    loader = DataLoader(DATA, batch_size=16)
    trainer = Trainer(
        model=model, train_dataloader=loader, max_duration="1ep", optimizers=optimizer, device="cpu", progress_bar=False
    )
    if save_first:
        trainer.save_checkpoint(f"{tempfile.mkdtemp()}/first.pt")
    trainer.fit()
    return model.layer.weight.detach()


print(*(f"{name} {version(name)}" for name in ("torch", "mosaicml")))
print("expected: the same weights, whether the optimizer's state was read or not")
as_described = True
for name, build in OPTIMIZERS.items():
    (first, expected), (other, before), (_, later) = (train(build, read_at) for read_at in (None, 0, 1))
    differences = [(weights - expected).abs().max().item() for weights in (before, later)]
    print(
        f"seen: {name}: first update {first:.4f}, and {other:.4f} if the state was read before; the last weights then "
        f"differ by {differences[0]:.4f}, and by {differences[1]:.4f} if it was read after the first step"
    )
    as_described &= (differences[0] > 1e-4) == (name != "SGD with momentum") and differences[1] == 0
saved, repeated = ((train_with_composer(first) - train_with_composer(False)).abs().max().item() for first in (True, False))
print(f"seen: Composer: the last weights differ by {saved:.4f} if a checkpoint was saved before, else by {repeated:.4f}")
sys.exit(not (as_described and saved > 1e-4 and repeated == 0))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/saved_first.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
