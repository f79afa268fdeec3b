"""Helper of test_retrieval.py: the InfoNCE loss and gradient of a rank, averaged over ranks as DDP does.

python two_ranks.py RANK RANKS PORT OUT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from biphasic.finetuning.retrieval import info_nce


def loss_and_gradient(rank: int, ranks: int) -> Tensor:
    """[1 + 16 * 16]."""
    generator = torch.Generator().manual_seed(0)
    queries, documents, negatives = (torch.randn(8, 16, generator=generator) for _ in range(3))
    # The last two documents, on different ranks of two, are equal to the first, and so is a hard negative.
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
    hard_ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 0])
    weight = torch.eye(16, requires_grad=True)
    share = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    mine = torch.cat([documents[share], negatives[share]])
    known = torch.cat([ids[share], hard_ids[share]])
    loss = info_nce(queries[share] @ weight, mine @ weight, known, 0.05, gather=True)
    loss.backward()
    assert weight.grad is not None
    return torch.cat([loss.detach()[None], weight.grad.flatten()])


def main(rank: int, ranks: int, port: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = loss_and_gradient(rank, ranks)
    dist.all_reduce(found)
    if rank == 0:
        torch.save(found / ranks, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
