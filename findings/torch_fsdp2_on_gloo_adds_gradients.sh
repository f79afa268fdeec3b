#!/usr/bin/env bash
# torch 2.7.0, fully_shard (FSDP2) on the gloo backend: gradients are the ranks' sum, not their mean.
#
# Expected: as with DistributedDataParallel, gradients are the mean over ranks. The gradient of a sum of a linear layer's outputs is its
# input: 1 on rank 0 and 3 on rank 1, so 2.
# Seen: 4. Nothing warns. FSDP2 asks for a reduce-scatter with an average, and gloo adds. With N ranks on CPUs the learning rate of SGD is N
# times what was set. torch 2.15.0 has 2.
#
# Checked on 2026-11-28, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" torch==2.7.0 numpy==2.1.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.7.0 numpy==2.1.3
fi
cat >"$work/two_ranks.py" <<'PYTHON'
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def compare(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(torch.nn.Linear(2, 2, bias=False))
        model(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
        gradient = next(model.parameters()).grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if rank == 0:
            results.put((wrap.__name__, gradient.unique().tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(compare, (port, results), nprocs=2)
    gradients = dict(results.get() for _ in range(2))
    print("torch", torch.__version__)
    print("expected: 2.0 for both")
    for name, values in gradients.items():
        print(f"{name}: {values}")
    sys.exit(gradients != {"DistributedDataParallel": [2.0], "fully_shard": [4.0]})
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/two_ranks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
