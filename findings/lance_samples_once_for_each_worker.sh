#!/usr/bin/env bash
# pylance 14.0.2: a torch dataset with `samples=50` gives 100 rows with two loader workers, some of them twice.
#
# Expected: LanceDataset's `samples`, the number of rows to draw, holds for the dataset, as all of its rows are divided among workers.
# Seen: each worker draws rows of its own. Two workers give 100 rows, of which about 25 come twice. Without `samples` the rows are divided rightly.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(pylance==14.0.2 pyarrow==22.0.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/rows.py" <<'PYTHON'
import tempfile
import warnings
from collections import Counter

import lance
import pyarrow as pa
from lance.torch.data import LanceDataset
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


def read(folder, workers, **options):
    dataset = LanceDataset(folder, batch_size=10, **options)
    context = "spawn" if workers else None
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
    counts = Counter(int(row) for batch in loader for row in (batch["row"] if isinstance(batch, dict) else batch))
    return counts.total(), len(counts)


if __name__ == "__main__":
    print("pylance", lance.__version__)
    with tempfile.TemporaryDirectory() as work:
        lance.write_dataset(pa.table({"row": range(100)}), f"{work}/rows.lance", max_rows_per_file=25)
        for options, workers, expected in (({}, 0, 100), ({}, 2, 100), ({"samples": 50}, 0, 50), ({"samples": 50}, 2, 50)):
            rows, distinct = read(f"{work}/rows.lance", workers, **options)
            print(f"{options}, {workers} workers: expected {expected} rows, seen {rows}, {distinct} of them different")
            if options and workers:
                assert rows == 100 and distinct < 90
            else:
                assert rows == distinct == expected
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/rows.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
