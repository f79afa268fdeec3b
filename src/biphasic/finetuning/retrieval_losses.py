"""Losses of retrieval on the embeddings of a batch: contrastive, and distillation from a teacher's scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.finetune import LEARNED_TEMPERATURES


class LearnedTemperature(nn.Module):
    """A temperature with a trained logarithm, within `LEARNED_TEMPERATURES`, as in CLIP. `initial` is its first value."""

    def __init__(self, initial: float):
        super().__init__()
        self.initial = initial
        self.log_ratio = nn.Parameter(torch.zeros(()))
        """Logarithm of the temperature over its first value."""

    def forward(self) -> Tensor:
        """Return the temperature, after moving it back within its limits."""
        lowest, highest = (math.log(limit / self.initial) for limit in LEARNED_TEMPERATURES)
        with torch.no_grad():
            self.log_ratio.clamp_(lowest, highest)
        return self.initial * self.log_ratio.exp()


def info_nce(
    queries: Tensor, documents: Tensor, ids: Tensor, temperature: float | Tensor, relevant: Tensor | None = None
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


def symmetric_info_nce(
    queries: Tensor,
    documents: Tensor,
    ids: Tensor,
    temperature: float | Tensor,
    relevant: Tensor | None = None,
    query_ids: Tensor | None = None,
    relevant_queries: Tensor | None = None,
) -> Tensor:
    """Return the mean of InfoNCE in both directions; arguments are as for `info_nce`.

    In the second direction, each query's document finds its query among all queries of the global batch. Queries of an
    equal document are no negatives, nor those of `relevant_queries` (int64 [pairs, any]) among `query_ids`, and hard
    negatives take no part.
    """
    own = documents[: len(queries)]
    own_ids = ids[: len(queries)].contiguous() if query_ids is None else query_ids
    backward = info_nce(own, queries, own_ids, temperature, relevant_queries)
    return (info_nce(queries, documents, ids, temperature, relevant) + backward) / 2


def margin_mse(queries: Tensor, documents: Tensor, scores: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the mean squared error of the margins between positive and negatives against the teacher's margins.

    That of sentence-transformers' MarginMSELoss with cosine similarity over the temperature in place of the dot product,
    because embeddings are compared by cosine. Arguments are as for `kl_divergence`.
    """
    similarities = candidate_similarities(queries, documents, temperature)
    return F.mse_loss(similarities[:, :1] - similarities[:, 1:], scores[:, :1] - scores[:, 1:])


def kl_divergence(queries: Tensor, documents: Tensor, scores: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the teacher's distribution over a query's documents from the model's.

    That of sentence-transformers' DistillKLDivLoss with cosine similarity over the temperature in place of the dot
    product. Only a query's own documents are compared, so ranks need nothing of each other.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [pairs * (1 + negatives), width] of the queries' documents in order, then of each query's
            hard negatives.
        scores: the teacher's scores [pairs, 1 + negatives], the positive's first.
    """
    similarities = candidate_similarities(queries, documents, temperature)
    return F.kl_div(similarities.log_softmax(1), scores.softmax(1), reduction="batchmean")


def candidate_similarities(queries: Tensor, documents: Tensor, temperature: float | Tensor) -> Tensor:
    """Return each query's cosine similarities to its document and its hard negatives over the temperature.

    Arguments are as for `kl_divergence`, and the result is fp32 [pairs, 1 + negatives].
    """
    count, width = queries.shape
    candidates = torch.cat([documents[:count, None], documents[count:].view(count, -1, width)], 1)
    return F.cosine_similarity(queries[:, None].float(), candidates.float(), dim=2) / temperature


LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "info_nce": (info_nce, "ids"),
    "symmetric_info_nce": (symmetric_info_nce, "ids"),
    "margin_mse": (margin_mse, "scores"),
    "kl": (kl_divergence, "scores"),
}
"""The losses by the `task.loss` of a fine-tuning YAML, each with the part of a batch that it compares with."""
