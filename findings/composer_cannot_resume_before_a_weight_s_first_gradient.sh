#!/usr/bin/env bash
# Composer 0.32.1, torch 2.7.0: a run that is stopped before a weight has had its first gradient can't resume.
#
# Expected: a model with two heads, of which the second one is trained from batch 6 on, resumes from the checkpoint of batch 4 as it does from
# that of batch 7, and ends with the weights of the undisturbed run. PyTorch's own `state_dict` and `load_state_dict` do so.
# Seen: the resume from batch 7 is right, and the one from batch 4 ends with KeyError 'late.weight': AdamW has no state for a weight without
# a gradient, and `set_optimizer_state_dict` (torch.distributed.checkpoint), with which Composer loads, expects one for each weight.
# With torch 2.15.0 it is a RuntimeError that asks for `StateDictOptions(strict=False)`.
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
cat >"$work/two_heads.py" <<'PYTHON'
import copy
import sys
import tempfile
from importlib.metadata import version

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

FIRST_LATE_BATCH, BATCHES = 6, 10
generator = torch.Generator().manual_seed(1)
ROWS = [(torch.randn(8, generator=generator), row // 16 + 1) for row in range(16 * BATCHES)]


class TwoHeads(ComposerModel):
    """Trains its head `early` on the first batches, and `late` on the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, batch):
        head = self.late if int(batch[1][0]) >= FIRST_LATE_BATCH else self.early
        return head(batch[0])

    def loss(self, outputs, batch):
        return (outputs - 1).square().mean()


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def train(folder, until):
    """Train with Composer up to a batch, from the newest checkpoint of the folder."""
    model = TwoHeads()
    Trainer(
        model=model, train_dataloader=DataLoader(ROWS, batch_size=16), max_duration=f"{until}ba", run_name="two-heads",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), device="cpu", progress_bar=False, save_folder=folder,
        save_interval="1ba", autoresume=True,
    ).fit()
    return weights(model)


def resumed(stop):
    folder = tempfile.mkdtemp()
    train(folder, stop)
    try:
        return float((train(folder, BATCHES) - undisturbed).abs().max())
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"


def resumed_without_composer(stop):
    saved = None
    for begin, end in ((0, stop), (stop, BATCHES)):
        model = TwoHeads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for batch in list(DataLoader(ROWS, batch_size=16))[begin:end]:
            optimizer.zero_grad()
            model.loss(model(batch), batch).backward()
            optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return float((weights(model) - undisturbed).abs().max())


undisturbed = train(tempfile.mkdtemp(), BATCHES)
print(*(f"{name} {version(name)}" for name in ("mosaicml", "torch")))
print("expected: resumed at batch 4 or 7, the weights of the undisturbed run")
seen = {stop: resumed(stop) for stop in (7, 4)}
for stop, result in seen.items():
    print(f"seen: Composer, resumed at batch {stop}: {result if isinstance(result, str) else f'largest difference {result}'}")
own = resumed_without_composer(4)
print(f"seen: load_state_dict, resumed at batch 4: largest difference {own}")
sys.exit(not (seen[7] == 0.0 and str(seen[4]).startswith("KeyError 'late") and own == 0.0))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/two_heads.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
