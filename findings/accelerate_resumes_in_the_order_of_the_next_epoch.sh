#!/usr/bin/env bash
# accelerate 1.15.0: load_state and skip_first_batches within an epoch resume in the order of the next epoch.
#
# Expected: a run that is saved within a shuffled epoch, and resumed as the documentation says, reads the rows that the epoch has left.
# Seen: load_state restores the random state of the moment of saving, when the epoch's order had been drawn already. The first epoch after it
# draws the next epoch's order, and skip_first_batches skips the beginning of that: three rows are read twice in this epoch and three never.
# With DataLoaderConfiguration(use_seedable_sampler=True) the rest of the epoch is right, and the next epoch has the same order once more,
# unless the loader's set_epoch is called. Nothing warns.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(accelerate==1.15.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/resume.py" <<'PYTHON'
import sys
import tempfile

import accelerate
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader


def prepared(seedable):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    set_seed(0)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(range(16), batch_size=2, shuffle=True)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, loader


def rows_of(batches):
    return [row for batch in batches for row in batch.tolist()]


print("accelerate", accelerate.__version__, "torch", torch.__version__)
print("expected: the resumed run reads what the undisturbed one reads after its third batch")
as_described = True
for seedable in (False, True):
    with tempfile.TemporaryDirectory() as folder:
        accelerator, loader = prepared(seedable)
        first = []
        for index, batch in enumerate(loader):
            first += batch.tolist()
            if index == 2:
                accelerator.save_state(folder)
        second = rows_of(loader)
        accelerator, loader = prepared(seedable)
        accelerator.load_state(folder)
        rest, after = rows_of(accelerator.skip_first_batches(loader, 3)), rows_of(loader)
        loader.set_epoch(1)
        with_epoch = rows_of(loader)
    print(f"seen: use_seedable_sampler={seedable}: undisturbed", first[:6], first[6:], "then", second)
    print(f"seen: use_seedable_sampler={seedable}: resumed    ", first[:6], rest, "then", after)
    read_twice, never_read = set(first[:6]) & set(rest), set(range(16)) - set(first[:6]) - set(rest)
    print(f"seen: use_seedable_sampler={seedable}: rows read twice in the first epoch: {sorted(read_twice)}, never: {sorted(never_read)}")
    if seedable:
        as_described &= rest == first[6:] and after == first != second == with_epoch
    else:
        as_described &= rest == second[6:] and bool(read_twice) and bool(never_read)
sys.exit(not as_described)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resume.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
