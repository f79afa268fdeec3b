#!/usr/bin/env bash
# scikit-learn 1.9.1: the micro F1 of a label matrix with one column is the accuracy.
#
# Expected: f1_score(average="micro") of an indicator matrix [examples, labels] counts the labels that are right and wrong, whatever the number
# of labels: 2 tp / (2 tp + fp + fn).
# Seen: with two columns it does. With one column the matrix is read as a classification between 0 and 1, both of which are classes: the
# micro F1 is the accuracy, and the macro F1 is a mean with the F1 of "not the label". A model that never predicts a label of one example in
# ten scores 0.9 in place of 0, without a warning; precision_score and recall_score do alike. average="binary" gives the label's own F1.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(scikit-learn==1.9.1 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/one_label.py" <<'PYTHON'
import numpy as np
import sklearn
from sklearn.metrics import f1_score, recall_score

print("scikit-learn", sklearn.__version__)
toxic = np.array([[1], [0], [0], [0], [0], [0], [0], [0], [0], [0]])
spam = np.roll(toxic, 3, axis=0)
never = np.zeros_like(toxic)
print("expected: a micro F1 of 0 for a model that predicts no label, with one label as with two")
one = f1_score(toxic, never, average="micro", zero_division=0)
two = f1_score(np.hstack([toxic, spam]), np.hstack([never, never]), average="micro", zero_division=0)
print(f"seen: two labels {two}, one label {one}")
recall = recall_score(toxic, never, average="micro", zero_division=0)
macro = f1_score(toxic, never, average="macro", zero_division=0)
binary = f1_score(toxic, never, average="binary", zero_division=0)
print(f"one label: micro recall {recall}, macro F1 {macro:.3f}, average='binary' {binary}")
raise SystemExit(0 if two == 0 and one == recall == 0.9 and abs(macro - 0.474) < 0.001 and binary == 0 else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/one_label.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
