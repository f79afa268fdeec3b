#!/usr/bin/env bash
# Composer 0.32.1, ProgressBarLogger: a checkpoint that is saved within a validation can't be loaded with a progress bar.
#
# Expected: a Trainer with the same arguments loads it and continues.
# Seen: KeyError: 'n'. load_state_dict takes the position of the validation's bar out of the training bar's state, from which it has
# just removed it. The progress bar is on by default, and the same file loads with progress_bar=False.
#
# Checked on 2026-11-28, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" mosaicml==0.32.1 numpy==2.1.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check mosaicml==0.32.1 numpy==2.1.3
fi
cat >"$work/save_within_validation.py" <<'PYTHON'
import os
import sys

import composer
import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

rows = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))


def make_trainer(**options):
    network = torch.nn.Linear(4, 2)
    return Trainer(
        model=ComposerClassifier(network, num_classes=2),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        train_dataloader=DataLoader(rows, batch_size=2),
        device="cpu",
        **options,
    )


class SaveWithinValidation(Callback):
    def eval_batch_end(self, state, logger):
        if not os.path.exists("within.pt"):
            trainer.save_checkpoint("within.pt", weights_only=False)


bars = open("bars", "w")
options = {"max_duration": "4ba", "eval_interval": "2ba", "eval_dataloader": DataLoader(rows, batch_size=2)}
trainer = make_trainer(**options, callbacks=[SaveWithinValidation()], console_stream=bars)
trainer.fit()
trainer.close()
print("composer", composer.__version__, "torch", torch.__version__)
print("expected: loads at batch 2")
without = make_trainer(**options, load_path="within.pt", progress_bar=False)
print("without a progress bar: loads at batch", int(without.state.timestamp.batch))
try:
    make_trainer(**options, load_path="within.pt", console_stream=bars)
except KeyError as error:
    print("with it: KeyError:", error)
    sys.exit(str(error) != "'n'")
print("with it: loads")
sys.exit(1)
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/save_within_validation.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
