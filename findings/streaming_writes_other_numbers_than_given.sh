#!/usr/bin/env bash
# Streaming 0.13.0: MDSWriter wraps NumPy integers that don't fit their column, and reverses the bytes of big-endian arrays.
#
# Expected: a number that a column's type can't hold is refused, as Python's integers are, and arrays of another dtype; an array that is written
# is read with the same values.
# Seen: `np.int64(70_000)` in a `uint16` column is read as 4464, and `np.int64(2**40)` in an `int32` column as 0: a NumPy integer is cast without a
# check. In a column `ndarray`, which stores dtype and shape with each array, one of dtype `>i4` is written as `int32` with its bytes
# as they are, so that [1, 2] is read as [16777216, 33554432]. Nothing is raised or warned.
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
cat >"$work/other_numbers.py" <<'PYTHON'
import sys
import tempfile
import warnings
from importlib.metadata import version

import numpy as np
from streaming import LocalDataset, MDSWriter

warnings.simplefilter("error", RuntimeWarning)


def written_and_read(column, value):
    """Write a dataset of one row, and return what is read from it, or the name of the error."""
    folder = tempfile.mkdtemp()
    try:
        with MDSWriter(out=folder, columns={"value": column}) as writer:
            writer.write({"value": value})
    except (OverflowError, ValueError) as error:
        return type(error).__name__
    return LocalDataset(local=folder)[0]["value"].tolist()


CASES = [
    ("uint16", 70_000, "OverflowError"),
    ("uint16", np.int64(70_000), 4464),
    ("int32", np.int64(2**40), 0),
    ("ndarray:uint16", np.array([70_000]), "ValueError"),
    ("ndarray", np.array([1, 2], dtype="<i4"), [1, 2]),
    ("ndarray", np.array([1, 2], dtype=">i4"), [16777216, 33554432]),
]
print(f"mosaicml-streaming {version('mosaicml-streaming')} numpy {np.__version__}")
print("expected: the value, or an error")
as_described = True
for column, value, described in CASES:
    read = written_and_read(column, value)
    print(f"seen: {value!r} in a column {column}: {read}")
    as_described &= read == described
sys.exit(not as_described)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/other_numbers.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
