"""Helper of test_retrieval.py: the InfoNCE loss and gradient of each rank, averaged over ranks as DDP does.

composer -n N two_ranks.py OUT
"""

from __future__ import annotations

import sys

import torch
from composer.utils import dist, get_device

from biphasic.finetuning.retrieval import info_nce


def main(out: str) -> None:
    dist.initialize_dist(get_device("cpu"))
    world, rank = dist.get_world_size(), dist.get_global_rank()
    generator = torch.Generator().manual_seed(0)
    queries, documents, negatives = (torch.randn(8, 16, generator=generator) for _ in range(3))
    # The last two documents, on different ranks of two, are equal to the first, and so is a hard negative.
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
    hard_ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 0])
    weight = torch.eye(16, requires_grad=True)
    share = slice(rank * 8 // world, (rank + 1) * 8 // world)
    mine = torch.cat([documents[share], negatives[share]])
    known = torch.cat([ids[share], hard_ids[share]])
    loss = info_nce(queries[share] @ weight, mine @ weight, known, 0.05, gather=True)
    loss.backward()
    assert weight.grad is not None
    found = torch.cat([loss.detach()[None], weight.grad.flatten()])
    dist.all_reduce(found, reduce_operation="SUM")
    if rank == 0:
        torch.save(found / world, out)


if __name__ == "__main__":
    main(sys.argv[1])
