"""Helper of test_retrieval.py, run on each rank: fine-tunings, then the loss and gradient of InfoNCE.

python two_ranks.py OUT YAML ...: the first rank writes loss and gradient to OUT, averaged over ranks as DDP does.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.finetuning.retrieval import info_nce
from biphasic.finetuning.run import run


def loss_and_gradient(rank: int, ranks: int) -> Tensor:
    """Return [1 + 16 * 16]."""
    generator = torch.Generator().manual_seed(0)
    queries, documents, negatives = (torch.randn(8, 16, generator=generator) for _ in range(3))
    # The last two documents, on different ranks of two, are equal to the first, and so is a hard negative.
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
    negative_ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 0])
    weight = torch.eye(16, requires_grad=True)
    share = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    local_documents = torch.cat([documents[share], negatives[share]])
    local_ids = torch.cat([ids[share], negative_ids[share]])
    loss = info_nce(queries[share] @ weight, local_documents @ weight, local_ids, 0.05)
    loss.backward()
    assert weight.grad is not None
    return torch.cat([loss.detach()[None], weight.grad.flatten()])


def main(out: str, *paths: str) -> None:
    for path in paths:
        config = load(path)
        assert isinstance(config, FinetuneConfig)
        run(config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mean = loss_and_gradient(rank, ranks)
    dist.all_reduce(mean)
    if rank == 0:
        torch.save(mean / ranks, out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
