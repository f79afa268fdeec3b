#!/usr/bin/env bash
# Composer 0.32.1: its metrics CrossEntropy and LossMetric weigh batches equally, so that they depend on the batch size.
#
# Expected: an average over all rows, as its MaskedAccuracy and LanguageCrossEntropy give, and as torchmetrics gives for other metrics: ten rows
# have one loss, whatever batches they come in.
# Seen: both add up the mean losses of batches and divide by their number. A short last batch counts like a full one, and the tokens of a
# batch with few labels count more: ten rows in batches of 10, 4 and 3 have three losses. On several ranks the number of ranks
# changes it too. A comparison of models that were validated with other batch sizes compares other averages.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mosaicml==0.32.1 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/loss.py" <<'PYTHON'
import sys

import composer
import torch
from composer.metrics import CrossEntropy, LanguageCrossEntropy, LossMetric

torch.manual_seed(0)
logits, labels = torch.randn(10, 3), torch.randint(3, (10,))


def by_batches(metric, size):
    for first in range(0, len(labels), size):
        metric.update(logits[first : first + size], labels[first : first + size])
    return metric.compute().item()


print("composer", composer.__version__)
mean = torch.nn.functional.cross_entropy(logits, labels).item()
print(f"expected: the mean loss of the rows, {mean:.4f}, in batches of 10, 4 and 3")
metrics = {
    "CrossEntropy": CrossEntropy,
    "LossMetric": lambda: LossMetric(torch.nn.functional.cross_entropy),
    "LanguageCrossEntropy": LanguageCrossEntropy,
}
seen = {name: [by_batches(make(), size) for size in (10, 4, 3)] for name, make in metrics.items()}
for name, losses in seen.items():
    print(f"seen: {name}: {', '.join(f'{loss:.4f}' for loss in losses)}")
right = all(abs(loss - mean) < 1e-5 for loss in seen["LanguageCrossEntropy"])
others = [seen["CrossEntropy"], seen["LossMetric"]]
sys.exit(not (right and all(abs(one[0] - mean) < 1e-5 and abs(one[2] - mean) > 0.05 for one in others)))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/loss.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
