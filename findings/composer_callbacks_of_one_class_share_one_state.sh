#!/usr/bin/env bash
# Composer 0.32.1: of two callbacks of one class, both get the second one's state when a run resumes.
#
# Expected: each callback of a Trainer gets back in load_state_dict what its own state_dict returned.
# Seen: a checkpoint holds callbacks' states by the name of their class, so that the last callback of a class replaces the others',
# and each of them is given it. Here one counts batches and one counts tens: 4 and 40 when the checkpoint is saved, 40 and 40
# after it is loaded. Nothing warns.
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
cat >"$work/two_counters.py" <<'PYTHON'
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


class Counter(Callback):
    def __init__(self, step):
        self.step, self.total = step, 0

    def batch_end(self, state, logger):
        self.total += self.step

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


saved, loaded = [Counter(1), Counter(10)], [Counter(1), Counter(10)]
trainer = make_trainer(max_duration="4ba", callbacks=saved, progress_bar=False)
trainer.fit()
trainer.save_checkpoint("checkpoint.pt", weights_only=False)
trainer.close()
make_trainer(max_duration="8ba", callbacks=loaded, progress_bar=False, load_path="checkpoint.pt")
totals = [[callback.total for callback in callbacks] for callbacks in (saved, loaded)]
print("composer", composer.__version__, "torch", torch.__version__)
print("saved:   ", totals[0])
print("expected:", totals[0])
print("loaded:  ", totals[1])
sys.exit(totals != [[4, 40], [40, 40]])
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/two_counters.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
