#!/usr/bin/env bash
# torchmetrics 1.9.0, MatthewsCorrCoef for two classes: a model that predicts one label for all examples isn't scored 0.
#
# Expected: 0, the limit of the correlation, which scikit-learn returns, and torchmetrics itself for three classes.
# Seen: a small constant is added to the denominator, and the numerator is its square root times a difference of counts, so the score
# depends on the number of examples: if the positive label is predicted for all and right for 7 in 10, it is 0.28 of 10 examples and
# 0.03 of 1,043. A fine-tuning that has collapsed is scored above 0 where positives are frequent, below 0 where they are rare, and
# that enters averages over tasks. (Lightning-AI/torchmetrics issue 3355 is about labels that are constant too.)
#
# Checked on 2026-11-29, Python 3.12, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torchmetrics==1.9.0 torch==2.11.0 numpy==2.3.5 scikit-learn==1.7.2)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/one_label.py" <<'PYTHON'
import sys
import warnings

import torch
import torchmetrics
from sklearn.metrics import matthews_corrcoef

warnings.simplefilter("ignore")
print("torchmetrics", torchmetrics.__version__)
print("positive of all, label predicted for all: scikit-learn, torchmetrics with 3 classes, with 2, binary")
rows = []
for positive, count, label in ((7, 10, 1), (721, 1043, 1), (3, 10, 1), (500, 1000, 1)):
    targets = torch.tensor([1] * positive + [0] * (count - positive))
    predictions = torch.full_like(targets, label)
    row = [matthews_corrcoef(targets, predictions)]
    for settings in ({"task": "multiclass", "num_classes": 3}, {"task": "multiclass", "num_classes": 2}, {"task": "binary"}):
        row.append(torchmetrics.MatthewsCorrCoef(**settings)(predictions, targets).item())
    rows.append([round(float(score), 4) for score in row])
    print(f"{positive} of {count}, {label}:", *rows[-1])
print("expected: 0 everywhere")
seen = [[0, 0, 0.276, 0.276], [0, 0, 0.0256, 0.0256], [0, 0, -0.276, -0.276], [0, 0, 0, 0]]
sys.exit(rows != seen)
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/one_label.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
