#!/usr/bin/env bash
# lightning 2.6.6: a run with BackboneFinetuning that resumes after the unfreezing trains its backbone no more.
#
# Expected: a run of 4 epochs that unfreezes its backbone at epoch 1 and resumes from its checkpoint of epoch 1 or 2 (at an epoch's end, with
# the whole order of batches the same) ends with the weights of the undisturbed run.
# Seen: the callback freezes the backbone again when the resumed run starts, and unfreezes it only in the epoch named, which is over. The
# optimizer has the backbone's group and its learning rate, so nothing shows it; the backbone doesn't change in the rest of the run.
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
cat >"$work/frozen.py" <<'PYTHON'
import logging
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return (self.head(self.backbone(batch[0])) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda weight: weight.requires_grad, self.parameters()), lr=0.05)


rows = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))


def train(folder, resume_from=None):
    model = Net()
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.2, should_align=False)
    save = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[unfreeze, save],
    )
    trainer.fit(model, DataLoader(rows, batch_size=4), ckpt_path=resume_from)
    return model, [group["lr"] for group in trainer.optimizers[0].param_groups]


print("lightning", lightning.__version__)
print("expected: a resumed run changes the backbone as the undisturbed run does")
with tempfile.TemporaryDirectory() as work:
    whole, rates = train(f"{work}/whole")
    for epoch in (0, 1, 2):
        saved = torch.load(f"{work}/whole/epoch={epoch}.ckpt", weights_only=False)["state_dict"]["backbone.weight"]
        resumed, resumed_rates = train(f"{work}/resumed", f"{work}/whole/epoch={epoch}.ckpt")
        assert resumed_rates == rates
        changes = [float((model.backbone.weight.detach() - saved).abs().max()) for model in (whole, resumed)]
        print(f"from epoch {epoch}: largest change of the backbone {changes[0]:.3f}; after a resume {changes[1]:.3f}")
        # Before the unfreezing a resume is right.
        assert changes[0] > 0.1 and changes[1] == (changes[0] if epoch == 0 else 0)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/frozen.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
