"""Helper of the tests of retrieval, run on each rank: fine-tunings, then losses and gradients.

python two_ranks.py OUT YAML ...: the first rank writes what `measure` returns for the first YAML to OUT, averaged over
ranks as DDP does.
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.downstream.array_cache import Ragged
from biphasic.finetuning.batches import GlobalBatches
from biphasic.finetuning.retrieval import Retrieval, info_nce
from biphasic.finetuning.run import run
from biphasic.finetuning.task import Examples
from biphasic.finetuning.trainer import FinetuneModel
from biphasic.model.encoder import Encoder, load_encoder

PAIRS = 4096


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


def random_pairs(count: int, longest: int = 12) -> Examples:
    """Return pairs of texts of 2 to `longest` - 1 tokens with a hard negative each and a teacher's scores."""
    generator = np.random.default_rng(0)

    def texts(number: int) -> Ragged:
        return Ragged.of(generator.integers(4, 60, int(length)) for length in generator.integers(2, longest, number))

    return {
        "texts": texts(count),
        "documents": texts(2 * count),
        "ids": Ragged.of([range(2 * count)], np.int64),
        "negatives": Ragged.of([[count + row] for row in range(count)]),
        "scores": Ragged.of(generator.normal(0, 3, (count, 2)), np.float32),
    }


def batch_gradient(
    config: FinetuneConfig, encoder: Encoder, tokens_per_pass: int, rank: int = 0, ranks: int = 1, longest: int = 12
) -> tuple[Tensor, FinetuneModel]:
    """Return a rank's loss and gradient in the first batch of random pairs, [1 + parameters], and the model."""
    task = Retrieval(config.task, encoder.text_tokenizer, config.cache)
    model = FinetuneModel(encoder, task.build_head(encoder.width), task, tokens_per_pass)
    batches = GlobalBatches(task, random_pairs(config.batch_size, longest), config, 1, rank, ranks)
    [batch] = next(iter(batches))["parts"]
    loss = model.loss(model(batch), batch)["total"]
    loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat([loss.detach()[None], *gradients]), model


def large_batch(config: FinetuneConfig, **task: Any) -> FinetuneConfig:
    """Return a configuration with a batch of `PAIRS`."""
    return config.model_copy(update={"batch_size": PAIRS, "task": config.task.model_copy(update=task)})


def measure(config: FinetuneConfig, tokens_per_pass: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return loss and gradient of InfoNCE and of a large batch."""
    large = large_batch(config)
    return {
        "info_nce": loss_and_gradient(rank, ranks),
        "large": batch_gradient(large, load_encoder(config.model.path), tokens_per_pass, rank, ranks)[0],
    }


def main(out: str, *paths: str) -> None:
    configs = [load(path) for path in paths]
    for config in configs:
        assert isinstance(config, FinetuneConfig)
        run(config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if configs[0].task.kind == "retrieval":  # pyright: ignore
        measured = measure(configs[0], 4096, rank, ranks)  # pyright: ignore
        for mean in measured.values():
            dist.all_reduce(mean)
        if rank == 0:
            torch.save({name: mean / ranks for name, mean in measured.items()}, out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
