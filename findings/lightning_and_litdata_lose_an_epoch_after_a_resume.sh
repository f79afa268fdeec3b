#!/usr/bin/env bash
# lightning 2.6.6, litdata 0.2.76: a run that resumes within an epoch ends one epoch early.
#
# Expected: litdata's StreamingDataLoader, whose position Lightning saves, gives a resumed run all batches that were left.
# Seen: without workers it gives the batches of the interrupted epoch, and then none in the next one, which counts as trained: from step 3 of
# 24 a run trains 13 batches in place of 21, and ends without an error at step 16. Only runs that resume within the last epoch or at an
# epoch's last batch are right. A checkpoint of an epoch's end reads the first epoch's order again.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 litdata==0.2.76 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/epochs.py" <<'PYTHON'
import logging
import tempfile
import warnings

import lightning
import litdata
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, number):
        self.batches.append(batch["row"].tolist())
        return self.layer(batch["row"].float()[:, None] / 32).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def row(number):
    return {"row": number}


def train(folder, resume_from=None, **when):
    model = Line()
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset(f"{work}/rows", shuffle=True, seed=5), batch_size=4)
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **when)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[save]
    )
    trainer.fit(model, loader, ckpt_path=resume_from)
    return model.batches, trainer.global_step


if __name__ == "__main__":
    print("lightning", lightning.__version__, "litdata", litdata.__version__)
    print("expected: 8 batches an epoch, 3 epochs: each resumed run ends at step 24")
    with tempfile.TemporaryDirectory() as work:
        litdata.optimize(row, list(range(32)), f"{work}/rows", num_workers=1, chunk_size=8)
        whole, last = train(f"{work}/steps", every_n_train_steps=1)
        assert last == len(whole) == 24
        seen = {}
        for step in (3, 8, 12, 20):
            batches, last = train(f"{work}/more", f"{work}/steps/step={step}.ckpt", every_n_train_steps=1)
            seen[step] = len(batches), last, batches == whole[step:]
            print(f"seen: from step {step}: {len(batches)} batches of {24 - step}, up to step {last}")
        train(f"{work}/epochs", every_n_epochs=1)
        after, last = train(f"{work}/more", f"{work}/epochs/step=8.ckpt", every_n_epochs=1)
        print("seen: from the first epoch's end: the first epoch's batches again:", after[:8] == whole[:8] != whole[8:16])
    same = seen == {3: (13, 16, False), 8: (16, 24, True), 12: (4, 16, False), 20: (4, 24, True)}
    raise SystemExit(0 if same and after[:8] == whole[:8] != whole[8:16] else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/epochs.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
