#!/usr/bin/env bash
# torch 2.11.0: a distributed checkpoint keeps one rank's value of a name that all ranks use, and gives it to all of them.
#
# Expected: ranks that save different values under one name, such as their random states and positions in the data, get their own back, or
# an error says that they differ.
# Seen: torch.distributed.checkpoint takes equal names for copies of one value. It writes that of the rank which has the least to write, and
# loads it on all ranks: tensors as well as Python values. Nothing warns. After a resume all ranks draw the same random numbers and read
# the same rows, and the two need not be of one rank: here they are rank 1's random state and rank 0's row. Names that hold the rank
# ("rng.0", "rng.1") give each rank its own.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/ranks.py" <<'PYTHON'
import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as multiprocessing


def save_and_load(rank, folder, port, seen):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    random_state = torch.get_rng_state()
    checkpoint.save(
        {"weights": torch.ones(4), "rng": random_state, "row": 100 + rank, f"rng.{rank}": random_state},
        checkpoint_id=folder,
    )
    loaded = {"weights": torch.zeros(4), "rng": torch.zeros_like(random_state), "row": -1}
    loaded[f"rng.{rank}"] = torch.zeros_like(random_state)
    checkpoint.load(loaded, checkpoint_id=folder)
    own = [torch.equal(loaded[name], random_state) for name in ("rng", f"rng.{rank}")]
    seen[rank] = own[0], loaded["row"], own[1]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    print("expected: each rank loads its own random state and row: 100 and 101")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        seen = manager.dict()
        multiprocessing.spawn(save_and_load, (folder, port, seen), nprocs=2)
        seen = dict(seen)
    for rank, (own, row, by_name) in sorted(seen.items()):
        print(
            f"seen: rank {rank} loads {'its own' if own else 'another'} random state and row {row}; "
            f"under a name with the rank, {'its own' if by_name else 'another'}"
        )
    rows = {row for _, row, _ in seen.values()}
    one_state = sum(own for own, _, _ in seen.values()) == 1
    sys.exit(not (len(rows) == 1 and one_state and all(by_name for _, _, by_name in seen.values())))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/ranks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
