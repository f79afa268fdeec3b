#!/usr/bin/env bash
# datasets 5.2.0: Parquet files whose label names are in another order are read by the first file's names.
#
# Expected: each of two Parquet files that `to_parquet` wrote keeps its label names, [neg, pos] and [pos, neg], so reading both gives each text the
# label that it was written with, or an error, as `concatenate_datasets` raises for the same two datasets.
# Seen: load_dataset and from_parquet take the first file's names for all files, and the first split's for all splits, from files or a folder: of
# the second file each "pos" is read as "neg", without a warning. `save_to_disk` keeps each split's names.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(datasets==5.2.0 pyarrow==26.0.1 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/labels.py" <<'PYTHON'
import tempfile

import datasets
from datasets import ClassLabel, Dataset, Features, Value, concatenate_datasets, load_dataset

datasets.disable_progress_bars()
print("datasets", datasets.__version__)


def make(texts, names):
    # Each text is its own label.
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"text": texts, "label": [names.index(text) for text in texts]}, features=features)


def read(rows):
    return [f"{row['text']} as {rows.features['label'].int2str(row['label'])}" for row in rows]


first, second = make(["neg", "pos"], ["neg", "pos"]), make(["pos", "neg"], ["pos", "neg"])
right = ["neg as neg", "pos as pos"], ["pos as pos", "neg as neg"]
flipped = ["pos as neg", "neg as pos"]
assert (read(first), read(second)) == right
with tempfile.TemporaryDirectory() as work:
    for number, (name, rows) in enumerate({"train": first, "test": second}.items()):
        rows.to_parquet(f"{work}/files/{name}-{number}.parquet")
    train, test = f"{work}/files/train-0.parquet", f"{work}/files/test-1.parquet"
    assert [read(Dataset.from_parquet(each, cache_dir=f"{work}/{each[-6]}{each[-9]}")) for each in (train, test)] == [*right], "alone"
    print("expected: a text is read as its own label")
    seen = {
        "from_parquet, two files": read(Dataset.from_parquet([train, test], cache_dir=f"{work}/a")),
        "load_dataset, two files of a split": read(
            load_dataset("parquet", data_files=[train, test], split="train", cache_dir=f"{work}/b")
        ),
    }
    for way, both in seen.items():
        print(f"{way}: {both}")
        assert both == right[0] + flipped
    for way, splits in {
        "load_dataset, two splits": load_dataset("parquet", data_files={"train": train, "test": test}, cache_dir=f"{work}/c"),
        "load_dataset, a folder": load_dataset(f"{work}/files", cache_dir=f"{work}/d"),
        "streaming": load_dataset("parquet", data_files={"train": train, "test": test}, streaming=True),
    }.items():
        print(f"{way}: train {read(splits['train'])}, test {read(splits['test'])}")
        assert (read(splits["train"]), read(splits["test"])) == (right[0], flipped)
try:
    concatenate_datasets([first, second])
except ValueError as error:
    print("concatenate_datasets:", str(error)[:60], "...")
else:
    raise SystemExit(1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/labels.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
