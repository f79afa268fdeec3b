#!/usr/bin/env bash
# lightning 2.6.6: a run that resumes from the end of an epoch forgets what its ReduceLROnPlateau saw of that epoch.
#
# Expected: a run of 4 epochs with a ReduceLROnPlateau on the validation loss resumes from its checkpoint of an epoch's end with the learning
# rate of the undisturbed run.
# Seen: the checkpoint is written before that scheduler has seen the epoch's validation, and the resumed run begins with the next epoch. An
# epoch without improvement before an interruption isn't counted, and the rate stays higher. Other schedulers that step by epochs are right.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/plateau.py" <<'PYTHON'
import logging
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.rates = torch.nn.Linear(1, 1), kind, []

    def training_step(self, batch, number):
        if number == 0:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, number):
        self.log("validation", 1.0)  # no improvement after the first epoch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.08)
        if self.kind == "steps":
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"}}


rows = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)


def train(kind, folder, resume_from=None):
    model, save = Net(kind), ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[save]
    )
    trainer.fit(model, rows, rows, ckpt_path=resume_from)
    return model.rates


print("lightning", lightning.__version__)
for kind in ("steps", "plateau"):
    with tempfile.TemporaryDirectory() as work:
        whole = train(kind, f"{work}/whole")
        print(f"{kind}: the learning rate of each epoch, undisturbed: {whole}")
        for epoch in (1, 2):
            resumed = train(kind, f"{work}/resumed", f"{work}/whole/epoch={epoch}.ckpt")
            print(f"  resumed after epoch {epoch}: expected {whole[epoch + 1:]}, seen {resumed}")
            assert (resumed == whole[epoch + 1 :]) == (kind == "steps")
            if kind == "plateau":
                assert resumed[0] == whole[epoch], "one reduction is lost"
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/plateau.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
