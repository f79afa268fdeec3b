#!/usr/bin/env bash
# Composer 0.32.1, FSDP2Config(device_mesh=...): the mesh that is passed is replaced by a flat one.
#
# Expected: with a mesh of 2 x 2 ranks, (replicate, shard), weights are sharded over two ranks and replicated twice (hybrid sharding),
# as torch's fully_shard does with this mesh.
# Seen: weights are sharded over all four ranks, on a mesh of Composer's own. Nothing warns. On several nodes this gathers weights
# over the network between them, which such a mesh is there to avoid.
#
# Checked on 2026-11-28, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" mosaicml==0.32.1 numpy==2.1.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check mosaicml==0.32.1 numpy==2.1.3
fi
cat >"$work/mesh.py" <<'PYTHON'
import os
import sys

import torch
import torch.multiprocessing


def train(rank, port, results):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()}, LOCAL_WORLD_SIZE="4", NODE_RANK="0")
    import composer
    from composer import Trainer
    from composer.models import ComposerClassifier
    from composer.utils import dist
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    dist.initialize_dist("cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    direct = next(fully_shard(torch.nn.Linear(4, 4), mesh=mesh).parameters())
    rows, network = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)), torch.nn.Linear(4, 4)
    trainer = Trainer(
        model=ComposerClassifier(network, num_classes=4),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        train_dataloader=DataLoader(rows, batch_size=4, sampler=dist.get_sampler(rows)),
        max_duration="1ba",
        progress_bar=False,
        device="cpu",
        parallelism_config=ParallelismConfig(fsdp2=FSDP2Config(device_mesh=mesh)),
    )
    weight = next(trainer.state.model.parameters())
    if rank == 0:
        results.put((composer.__version__, list(direct.device_mesh.shape), list(weight.device_mesh.shape)))


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train, (port, results), nprocs=4)
    version, expected, seen = results.get()
    print("composer", version, "torch", torch.__version__)
    print("mesh of the weights, expected (fully_shard):", expected)
    print("mesh of the weights, seen (Trainer):        ", seen)
    sys.exit((expected, seen) != ([2, 2], [4]))
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/mesh.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
