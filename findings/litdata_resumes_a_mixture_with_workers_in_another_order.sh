#!/usr/bin/env bash
# litdata 0.2.76: a CombinedStreamingDataset that is read by workers and resumed from `state_dict` goes on in another order, and
# repeats rows.
#
# A StreamingDataLoader of two shuffled datasets with two workers is saved after nine batches of an epoch and resumed, as its README
# says. An undisturbed epoch reads each of the 105 rows once, and the same again in a second run. The resumed one reads other batches:
# some rows twice, and others never. Without workers, or with a single StreamingDataset, the resumed epoch equals the undisturbed one.
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
cat >"$work/resumed_mixture.py" <<'PYTHON'
import contextlib
import io
from itertools import islice

import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

SIZES, BATCH, STOP = {"a": 60, "b": 45}, 4, 9


def row_of_a(number):
    return {"row": torch.tensor(number)}


def row_of_b(number):
    return {"row": torch.tensor(1000 + number)}


def mixture(workers):
    parts = [StreamingDataset(name, shuffle=True, seed=3) for name in SIZES]
    return StreamingDataLoader(CombinedStreamingDataset(parts, seed=5, iterate_over_all=True), batch_size=BATCH, num_workers=workers)


def single(workers):
    return StreamingDataLoader(StreamingDataset("a", shuffle=True, seed=3), batch_size=BATCH, num_workers=workers)


def rows(batches):
    return [batch["row"].tolist() for batch in batches]


def resumed(build, workers):
    loader = build(workers)
    batches = iter(loader)
    read = rows(islice(batches, STOP))
    state = loader.state_dict()
    del batches
    loader = build(workers)
    loader.load_state_dict(state)
    return read + rows(loader)


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        optimize(fn=row_of_a, inputs=list(range(SIZES["a"])), output_dir="a", chunk_size=7, num_workers=1)
        optimize(fn=row_of_b, inputs=list(range(SIZES["b"])), output_dir="b", chunk_size=5, num_workers=1)
    for build, workers in ((single, 2), (mixture, 0), (mixture, 2)):
        undisturbed, again, after = rows(build(workers)), rows(build(workers)), resumed(build, workers)
        count = {row: sum(row in batch for batch in after) for batch in undisturbed for row in batch}
        twice, never = (sum(times == number for times in count.values()) for number in (2, 0))
        print(f"{build.__name__}, {workers} workers: two undisturbed epochs are equal: {undisturbed == again}; "
              f"resumed after {STOP} batches equal: {undisturbed == after}; rows read twice {twice}, never {never}, of {len(count)}")
        assert undisturbed == again and (undisturbed == after) == (workers == 0 or build is single)
        assert (twice > 0 and never > 0) == (undisturbed != after)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resumed_mixture.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
