#!/usr/bin/env bash
# accelerate 1.15.0, Streaming 0.13.0, litdata 0.2.76: of a dataset that divides itself among processes, half the rows are never trained.
#
# Expected: Streaming's and litdata's StreamingDataset give each process its share of the rows, and a loader that accelerate has prepared
# gives the same rows: two processes read all 32.
# Seen: `Accelerator.prepare`, with `dispatch_batches=False`, divides them among the processes once more, so that each reads half of its own
# half: 16 rows are read by nobody. transformers' Trainer prepares its
# loaders so with `accelerator_config={"dispatch_batches": False}`. The loader that isn't prepared is right; a Trainer whose
# `get_train_dataloader` returns it reads all rows (both seen with transformers 5.23.0).
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(accelerate==1.15.0 mosaicml-streaming==0.13.0 litdata==0.2.76 torch==2.11.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/divided_again.py" <<'PYTHON'
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.multiprocessing

ROWS, RANKS, FOLDER = 32, 2, Path(__file__).parent


def row(number):
    return {"row": number}


def read(rank, results):
    """Read an epoch of both datasets, through a loader as it is and through a prepared one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    import litdata
    import streaming
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    datasets = {
        "Streaming": streaming.StreamingDataset(local=str(FOLDER / "mds"), batch_size=2, shuffle=False),
        "litdata": litdata.StreamingDataset(str(FOLDER / "litdata"), shuffle=False),
    }
    for name, dataset in datasets.items():
        loaders = {"as it is": DataLoader(dataset, batch_size=2), "prepared": accelerator.prepare(DataLoader(dataset, batch_size=2))}
        for way, loader in loaders.items():
            rows = [int(number) for batch in loader for number in batch["row"]]
            shares = [None] * RANKS
            torch.distributed.all_gather_object(shares, rows)
            if rank == 0:
                results[f"{name}, {way}"] = shares
    torch.distributed.destroy_process_group()


def main():
    from litdata import optimize
    from streaming import MDSWriter

    with MDSWriter(out=str(FOLDER / "mds"), columns={"row": "int"}, size_limit=64) as writer:
        for number in range(ROWS):
            writer.write(row(number))
    optimize(fn=row, inputs=list(range(ROWS)), output_dir=str(FOLDER / "litdata"), chunk_size=4, num_workers=1, verbose=False)
    results = torch.multiprocessing.Manager().dict()
    torch.multiprocessing.spawn(read, (results,), RANKS)
    print(*(f"{name} {version(name)}" for name in ("accelerate", "mosaicml-streaming", "litdata", "torch")))
    print(f"expected: two processes together read {ROWS} rows")
    for name, shares in results.items():
        print(f"seen: {name}: {len({number for share in shares for number in share})} rows: {shares[0]} and {shares[1]}")
    counts = {name: len(set(sum(shares, []))) for name, shares in results.items()}
    sys.exit(counts != {f"{name}, {way}": count for name in ("Streaming", "litdata") for way, count in (("as it is", 32), ("prepared", 16))})


if __name__ == "__main__":
    main()
PYTHON
MASTER_ADDR=127.0.0.1 MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') \
    LITDATA_CACHE_DIR="$work/cache" CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/divided_again.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
