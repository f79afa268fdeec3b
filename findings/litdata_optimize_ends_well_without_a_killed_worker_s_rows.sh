#!/usr/bin/env bash
# litdata 0.2.76: `optimize` ends as if all were well if a worker process is killed, and its remaining rows are missing.
#
# A worker that a container's memory limit kills (SIGKILL) is reported as "done", and `optimize` writes the index over the chunks that
# there are and prints "Finished data processing!". Nothing is raised, the script goes on, and the dataset can be read: it is only
# shorter. An exception in the function does stop `optimize`. Compare the length of the dataset with that of the inputs.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(litdata==0.2.76 torch==2.11.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/killed_worker.py" <<'PYTHON'
import contextlib
import io
import os
import signal
import sys

import torch
from litdata import StreamingDataset, optimize

ROWS, KILLED_AT = 60, 40


def row(number):
    if number == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when a container's memory is full
    return {"number": torch.tensor(number)}


def fail(number):
    if number == KILLED_AT:
        raise ValueError("no such row")
    return {"number": torch.tensor(number)}


if __name__ == "__main__":
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            optimize(fn=fail, inputs=list(range(ROWS)), output_dir="failed", chunk_size=7, num_workers=2)
            raised = False
        except Exception:
            raised = True
        optimize(fn=row, inputs=list(range(ROWS)), output_dir="killed", chunk_size=7, num_workers=2)
    length = len(StreamingDataset("killed"))
    finished = "Finished data processing!" in printed.getvalue().split("killed")[-1]
    print(f"a worker raises an exception at row {KILLED_AT}: optimize raises {raised}")
    print(f"a worker is killed at row {KILLED_AT} of {ROWS}: optimize raises False, says that it finished {finished}, and the dataset has {length} rows")
    assert raised and finished and 0 < length < ROWS
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/killed_worker.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
