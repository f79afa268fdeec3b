#!/usr/bin/env bash
# lightning 2.6.6, torchdata 0.11.0: a run that resumes reads the shorter set of a CombinedLoader again, which it had finished.
#
# Expected: with `CombinedLoader(mode="max_size")`, which gives None for a loader that has ended, and StatefulDataLoaders, whose position Lightning saves, a
# resumed run gets the batches that the undisturbed run gets.
# Seen: a loader that had ended before the checkpoint begins anew. Of an epoch of 12 steps whose second loader has 5 batches, each resume from a
# step after the fifth trains these 5 batches once more, as far as steps are left.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 torchdata==0.11.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/combined.py" <<'PYTHON'
import logging
import tempfile
import warnings

import lightning
import torch
import torchdata
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.batches = torch.nn.Linear(1, 1), []

    def training_step(self, batch, number):
        self.batches.append({name: None if rows is None else rows.tolist() for name, rows in batch.items()})
        return self.layer(batch["long"].float()[:, None] / 50).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder, resume_from=None):
    model = Net()
    loaders = {
        "long": StatefulDataLoader(list(range(24)), batch_size=2),
        "short": StatefulDataLoader(list(range(100, 110)), batch_size=2),
    }
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[save]
    )
    trainer.fit(model, CombinedLoader(loaders, mode="max_size"), ckpt_path=resume_from)
    return model.batches


print("lightning", lightning.__version__, "torchdata", torchdata.__version__)
with tempfile.TemporaryDirectory() as work:
    whole = train(f"{work}/whole")
    assert [batch["short"] is None for batch in whole] == [False] * 5 + [True] * 7
    for step in (3, 6, 10):
        resumed = train(f"{work}/resumed", f"{work}/whole/step={step}.ckpt")
        expected, seen = ([batch["short"] for batch in batches] for batches in (whole[step:], resumed))
        print(f"the short loader's batches after step {step}: expected {expected}, seen {seen}")
        assert [batch["long"] for batch in resumed] == [batch["long"] for batch in whole[step:]]
        assert (seen == expected) == (step < 5)
        if step > 5:
            assert seen[:5] == [batch["short"] for batch in whole[:5]][: len(seen)]
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/combined.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
