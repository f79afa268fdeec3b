#!/usr/bin/env bash
# Streaming 0.13.0: a StreamingDataLoader whose collate function packs rows resumes at rows that were read before.
#
# Expected: after three batches of 4 rows a loader that takes over state_dict() reads row 12 next, as it does if rows are padded.
# Seen: the loader counts a batch's rows by the length of its first tensor. A packed batch, [1, tokens] as transformers' flash attention and
# DataCollatorWithFlattening have it, counts as one row: the state says 3, and rows 3 to 11 are trained again. Nothing warns. On resumes
# in a long epoch the run hardly moves: with batches of 64 rows it goes back by 98% of what it had read.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mosaicml-streaming==0.13.0 torch==2.7.0 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/loader.py" <<'PYTHON'
import sys
import tempfile

import numpy as np
import streaming
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset


def padded(rows):
    ids = [torch.from_numpy(row["input_ids"].copy()) for row in rows]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)}


def packed(rows):
    lengths = [len(row["input_ids"]) for row in rows]
    ids = np.concatenate([row["input_ids"] for row in rows])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {"input_ids": torch.from_numpy(ids)[None], "position_ids": torch.from_numpy(positions)[None]}


def numbers(batch):
    """The numbers of a batch's rows."""
    return [int(number) for number in batch["input_ids"].unique() if number >= 0]


def loader(folder, collate):
    dataset = StreamingDataset(local=folder, batch_size=4, shuffle=False)
    return StreamingDataLoader(dataset, batch_size=4, collate_fn=collate)


def next_rows(folder, collate):
    """The rows of the fourth batch, undisturbed and after a resume."""
    first = loader(folder, collate)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    undisturbed = numbers(next(batches))
    resumed = loader(folder, collate)
    resumed.load_state_dict(state)
    return undisturbed, numbers(next(iter(resumed)))


print("mosaicml-streaming", streaming.__version__)
print("expected: rows 12 to 15 after three batches of 4, resumed or not")
with tempfile.TemporaryDirectory() as folder:
    with MDSWriter(out=folder, columns={"input_ids": "ndarray"}) as writer:
        for row in range(64):
            writer.write({"input_ids": np.full(3 + row % 3, row, np.int32)})
    seen = {collate.__name__: next_rows(folder, collate) for collate in (padded, packed)}
for name, (undisturbed, resumed) in seen.items():
    print(f"seen: {name}: {undisturbed}, and {resumed} after a resume")
rows = [12, 13, 14, 15]
sys.exit(not (seen["padded"] == (rows, rows) and seen["packed"] == (rows, [3, 4, 5, 6])))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/loader.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
