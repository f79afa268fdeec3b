#!/usr/bin/env bash
# torch 2.11.0: reading a DataLoader that isn't shuffled changes the order of the shuffled one in later epochs.
#
# Expected: with a fixed seed, a validation set that is read in its own order between two epochs leaves the next epoch's order alone.
# Seen: each iteration over a DataLoader draws a base seed for its workers from torch's default generator, without workers and
# without shuffling too, and the shuffled loader draws its seed from the same generator. So two runs that differ in how often they
# validate train on another order, and on other masks and dropout on a CPU. A generator of its own for the validation's loader,
# DataLoader(..., generator=torch.Generator()), prevents it.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/orders.py" <<'PYTHON'
import sys

import torch
from torch.utils.data import DataLoader


def epochs(**validation):
    """The order of two epochs of training, with or without a validation after each."""
    torch.manual_seed(0)
    training, orders = DataLoader(range(8), shuffle=True), []
    for _ in range(2):
        orders.append([int(row) for row in training])
        if validation:
            assert [int(row) for row in DataLoader(range(3), **validation)] == [0, 1, 2]
    return orders


print("torch", torch.__version__)
print("expected: the same two orders with and without validation")
without, sequential, own = epochs(), epochs(shuffle=False), epochs(shuffle=False, generator=torch.Generator())
print("seen: without validation", *without)
print("seen: with validation   ", *sequential)
print("seen: with a generator  ", *own)
sys.exit(not (without[0] == sequential[0] and without[1] != sequential[1] and without == own))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/orders.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
