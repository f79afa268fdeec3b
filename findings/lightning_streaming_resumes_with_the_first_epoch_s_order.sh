#!/usr/bin/env bash
# lightning 2.6.6, Streaming 0.13.0: a run that resumes from the end of an epoch reads the first epoch's order again.
#
# Expected: a StreamingDataset, whose order differs in each epoch, continues with the second epoch's order when a run resumes after the first.
# Seen: Lightning keeps the position of a StreamingDataLoader in its checkpoints, but gives it back only within an epoch. After a checkpoint of
# an epoch's end the loader begins with the order of the first one: two epochs of one run have the same batches, and later ones those of the
# epochs before them. From a checkpoint within an epoch the order is right.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(lightning==2.6.6 mosaicml-streaming==0.13.0 torch==2.7.0 numpy==2.1.3)
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
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

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


def train(folder, resume_from=None, **when):
    clean_stale_shared_memory()
    model = Line()
    dataset = StreamingDataset(local=f"{work}/mds", batch_size=4, shuffle=True, shuffle_seed=5, num_canonical_nodes=1)
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **when)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[save]
    )
    trainer.fit(model, StreamingDataLoader(dataset, batch_size=4), ckpt_path=resume_from)
    return model.batches


if __name__ == "__main__":
    print("lightning", lightning.__version__)
    print("expected: after step 8, the first epoch's end, the batches that follow are those of the undisturbed run")
    with tempfile.TemporaryDirectory() as work:
        with MDSWriter(out=f"{work}/mds", columns={"row": "int"}) as writer:
            for row in range(32):
                writer.write({"row": row})
        whole = train(f"{work}/steps", every_n_train_steps=4)
        within = train(f"{work}/more", f"{work}/steps/step=4.ckpt", every_n_train_steps=4)
        assert train(f"{work}/epochs", every_n_epochs=1) == whole
        after = train(f"{work}/more", f"{work}/epochs/step=8.ckpt", every_n_epochs=1)
    print("the undisturbed run's epochs begin with", *(whole[first] for first in (0, 8, 16)))
    print("seen: resumed at the first epoch's end:", after[0], "then", after[8])
    print("seen: resumed within the first epoch, the batches are the undisturbed run's:", within == whole[4:])
    raise SystemExit(0 if within == whole[4:] and after == whole[:16] and whole[0] != whole[8] else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/epochs.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
