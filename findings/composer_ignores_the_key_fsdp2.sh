#!/usr/bin/env bash
# Composer 0.32.1, Trainer(parallelism_config={"fsdp2": FSDP2Config()}): the model isn't sharded, and nothing says so.
#
# Expected: the same as ParallelismConfig(fsdp2=FSDP2Config()), whose field has this name, or an error.
# Seen: of a dictionary the Trainer reads the keys "fsdp" and "tp" alone. With "fsdp2", as with a misspelt key, each rank trains with the
# whole model. {"fsdp": FSDP2Config()} shards it.
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
cat >"$work/three_spellings.py" <<'PYTHON'
import sys

from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig

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


dist.initialize_dist("cpu")
spellings = {
    "ParallelismConfig(fsdp2=...)": ParallelismConfig(fsdp2=FSDP2Config()),
    '{"fsdp": FSDP2Config()}': {"fsdp": FSDP2Config()},
    '{"fsdp2": FSDP2Config()}': {"fsdp2": FSDP2Config()},
}
kinds = []
print("composer", composer.__version__, "torch", torch.__version__)
print("expected: parameters of type DTensor, which are sharded")
for spelling, config in spellings.items():
    trainer = make_trainer(max_duration="1ba", parallelism_config=config, progress_bar=False)
    kinds.append(type(next(trainer.state.model.parameters())).__name__)
    print(f"{spelling}: {kinds[-1]}")
sys.exit(kinds != ["DTensor", "DTensor", "Parameter"])
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/three_spellings.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
