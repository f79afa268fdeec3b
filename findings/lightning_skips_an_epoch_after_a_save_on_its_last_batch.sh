#!/usr/bin/env bash
# lightning 2.6.6, torchdata 0.11.0: a run that resumes from a checkpoint of an epoch's last batch trains one epoch less.
#
# Expected: with torchdata's StatefulDataLoader, whose position Lightning saves, a resumed run trains the batches that were left.
# Seen: it does from each checkpoint of ModelCheckpoint(every_n_train_steps=...) but those of an epoch's last batch. After them it takes the
# next epoch for one without batches: from step 8 of 24 it trains 8 batches in place of 16, from step 16 none, and both end without an
# error at step 16. The position that was saved says that all rows are read, but not that the epoch is over. Checkpoints that are saved by
# epochs, and a plain DataLoader, lose no epoch.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 torch==2.11.0 torchdata==0.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/epochs.py" <<'PYTHON'
import logging
import os
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.trained = []  # the first row of each batch

    def training_step(self, batch, number):
        self.trained.append(int(batch[0][0]))
        return self.layer(batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(loader, folder, resume_from=None, **when):
    model = Line()
    data = TensorDataset(torch.arange(32), torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **when)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[save]
    )
    trainer.fit(model, loader(data, batch_size=4), ckpt_path=resume_from)
    return len(model.trained), trainer.global_step


print("lightning", lightning.__version__)
print("expected: 8 batches an epoch, 3 epochs: from step 8 a run trains 16 batches, from step 16 it trains 8, and ends at step 24")
seen = {}
for loader in (DataLoader, StatefulDataLoader):
    for when in ({"every_n_train_steps": 4}, {"every_n_epochs": 1}):
        with tempfile.TemporaryDirectory() as folder:
            assert train(loader, folder, **when) == (24, 24)
            for step in (8, 12, 16) if "every_n_train_steps" in when else (8, 16):
                batches, last = train(loader, folder + "/more", f"{folder}/step={step}.ckpt", **when)
                seen[loader.__name__, next(iter(when)), step] = batches, last
                print(f"seen: {loader.__name__}, {when}: from step {step} {batches} batches, up to step {last}")
right = {8: (16, 24), 12: (12, 24), 16: (8, 24)}
wrong = {key for key, result in seen.items() if result != right[key[2]]}
lost = ("StatefulDataLoader", "every_n_train_steps")
same = wrong == {(*lost, 8), (*lost, 16)} and seen[*lost, 8] == (8, 16) and seen[*lost, 16] == (0, 16)
raise SystemExit(0 if same else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/epochs.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
