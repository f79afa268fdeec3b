#!/usr/bin/env bash
# Composer 0.32.1, Trainer(save_num_checkpoints_to_keep=2, autoresume=True): each resume keeps two more checkpoints.
#
# Expected: the folder never holds more than two checkpoints, since older ones are removed when a new one is saved.
# Seen: what was saved before a resume is not removed any more: two, four, six checkpoints after one, two, three starts. The
# saver restores the times of all its checkpoints (CheckpointSaver.load_state_dict), and not the list from which it removes them.
# A run that is preempted often fills its disk, although it was told how many to keep.
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
cat >"$work/keep_two.py" <<'PYTHON'
import os
import sys

import composer
import torch
from composer import Trainer
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


kept = []
for end in ("4ba", "8ba", "12ba"):
    trainer = make_trainer(
        max_duration=end,
        run_name="run",
        save_folder="checkpoints",
        save_interval="1ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    kept.append(sorted((name for name in os.listdir("checkpoints") if "latest" not in name), key=lambda name: (len(name), name)))
print("composer", composer.__version__, "torch", torch.__version__)
print("expected: 2 checkpoints after each start")
for start, names in enumerate(kept, 1):
    print(f"after start {start}: {len(names)} checkpoints: {' '.join(names)}")
sys.exit([len(names) for names in kept] != [2, 4, 6])
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/keep_two.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
