#!/usr/bin/env bash
# torchmetrics 1.9.0, MeanMetric(nan_strategy="disable"): weights are ignored.
#
# Expected: nan_strategy="disable" disables "all nan checks" and changes nothing else: the mean of 1 (weight 3) and 3 (weight 1) is 1.5.
# Seen: 2, because without checks the weights are replaced by ones. A validation loss that is weighted by tokens becomes a mean over
# batches. The other strategies have 1.5. (Lightning-AI/torchmetrics issue 3434.)
#
# Checked on 2026-11-28, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" torchmetrics==1.9.0 torch==2.11.0 numpy==2.3.5
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.11.0 numpy==2.3.5
fi
cat >"$work/weighted_mean.py" <<'PYTHON'
import sys

import torch
import torchmetrics

means = {}
for strategy in ("warn", "ignore", "error", "disable"):
    metric = torchmetrics.MeanMetric(nan_strategy=strategy)
    metric.update(torch.tensor([1.0, 3.0]), weight=torch.tensor([3.0, 1.0]))
    means[strategy] = metric.compute().item()
print("torchmetrics", torchmetrics.__version__)
print("expected: 1.5 for each")
print("seen:", means)
sys.exit(means != {"warn": 1.5, "ignore": 1.5, "error": 1.5, "disable": 2.0})
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/weighted_mean.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
