#!/usr/bin/env bash
# torchmetrics 1.9.0: in a MetricCollection, metrics with other settings become one if they agree on the first batch.
#
# Expected: a collection of F1 at two thresholds, or of an accuracy with and one without `ignore_index`, gives what its metrics give alone.
# Seen: after the first batch, metrics of one kind whose counts are equal so far form a "compute group", and share one of them from then on. If
# no prediction of the first batch lies between the thresholds, F1 at 0.7 is that at 0.5 for all batches that follow: 0.75 in place of 0.67.
# With `compute_groups=False` each is right.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torchmetrics==1.9.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/groups.py" <<'PYTHON'
import torch
import torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

print("torchmetrics", torchmetrics.__version__)


def compare(make, batches):
    alone, grouped, apart = make(), MetricCollection(make()), MetricCollection(make(), compute_groups=False)
    for predicted, labels in batches:
        for each in (*alone.values(), grouped, apart):
            each.update(predicted, labels)
    def rounded(values):
        return {name: round(float(value), 3) for name, value in values.items()}
    one = rounded({name: metric.compute() for name, metric in alone.items()})
    print("  each alone:", one)
    print("  in a collection:", rounded(grouped.compute()))
    assert rounded(apart.compute()) == one
    return one, rounded(grouped.compute())


print("expected: the same values alone and in a collection")
print("F1 at two thresholds; of the first batch no prediction lies between them:")
one, seen = compare(
    lambda: {"f1_at_half": BinaryF1Score(threshold=0.5), "f1_at_more": BinaryF1Score(threshold=0.7)},
    [
        (torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 0])),
        (torch.tensor([0.6, 0.65, 0.9, 0.2]), torch.tensor([0, 1, 1, 0])),
    ],
)
assert one == {"f1_at_half": 0.75, "f1_at_more": 0.667}
assert seen == {"f1_at_half": 0.75, "f1_at_more": 0.75}
print("accuracy with and without class 2, which the first batch lacks:")
one, seen = compare(
    lambda: {
        "of_all": MulticlassAccuracy(3, average="micro"),
        "without_class_2": MulticlassAccuracy(3, average="micro", ignore_index=2),
    },
    [
        (torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])),
        (torch.tensor([2, 0, 2]), torch.tensor([0, 1, 2])),
    ],
)
assert one == {"of_all": 0.5, "without_class_2": 0.4}
assert seen == {"of_all": 0.5, "without_class_2": 0.5}
print("seen: the second metric of a collection has the first one's value")
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/groups.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
