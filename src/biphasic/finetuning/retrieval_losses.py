"""Losses of retrieval on the embeddings of a batch: contrastive, and distillation from a teacher's scores."""

from __future__ import annotations

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor


def info_nce(
    queries: Tensor, documents: Tensor, ids: Tensor, temperature: float, relevant: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of each query's own document among all documents of the global batch.

    This is the loss of the paper's evaluation library: cosine similarity, in-batch negatives, temperature 0.05. With
    several ranks, the documents of all ranks are negatives and receive gradients. The result is the mean over this
    rank's queries; its mean over ranks equals the loss of a single rank with all pairs.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [at least pairs, width] of the queries' documents in order, then of hard negatives.
        ids: int64 [documents]; a document with the same id as a query's own document is not a negative for it.
        relevant: int64 [pairs, any], ids of documents that are not negatives for each query. None: its own document's.
    """
    queries, documents = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    offset, count = 0, len(queries)
    relevant = ids[:count, None] if relevant is None else relevant
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from torch.distributed.nn.functional import all_gather

        offset = torch.distributed.get_rank() * len(documents)
        documents = torch.cat(list(all_gather(documents)))  # pyright: ignore[reportArgumentType]
        gathered = [torch.empty_like(ids) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, ids)
        ids = torch.cat(gathered)
    targets = torch.arange(offset, offset + count, device=queries.device)
    masked = (relevant[:, :, None] == ids).any(1)
    masked[torch.arange(count, device=queries.device), targets] = False
    with torch.autocast(queries.device.type, enabled=False):  # it would multiply in bf16, in steps of 0.1 and more
        similarities = queries @ documents.T / temperature
    return F.cross_entropy(similarities.masked_fill(masked, float("-inf")), targets)


def kl_divergence(queries: Tensor, documents: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the teacher's distribution over a query's documents from the model's.

    That of sentence-transformers' DistillKLDivLoss with cosine similarity over the temperature in place of the dot
    product. Only a query's own documents are compared, so ranks need nothing of each other.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [pairs * (1 + negatives), width] of the queries' documents in order, then of each query's
            hard negatives.
        scores: the teacher's scores [pairs, 1 + negatives], the positive's first.
    """
    count, width = queries.shape
    candidates = torch.cat([documents[:count, None], documents[count:].view(count, -1, width)], 1)
    similarities = F.cosine_similarity(queries[:, None].float(), candidates.float(), dim=2) / temperature
    return F.kl_div(similarities.log_softmax(1), scores.softmax(1), reduction="batchmean")
