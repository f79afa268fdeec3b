"""Exact search among embeddings in memory, and what it scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from biphasic.evaluation.metrics import mrr_at, ndcg_at, recall_at

_LOW_BITS = (1 << 32) - 1


def search(
    queries: Tensor, documents: Tensor, k: int, block: int = 2048, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k documents nearest to each query by cosine similarity, all of them compared.

    No more than `block` x `block` similarities exist at once. They are summed in fp64, then rounded to fp32, so that what
    should be equal is: on every device, with TF32 allowed or not, wherever a document lies in its block.

    Args:
        queries: floating [queries, width]; the results are on its device.
        documents: floating [documents, width], on any device; blocks of it are moved.
        k: how many; all documents where there are fewer.
        block: queries and documents that are compared at a time.
        order: int64 [documents], a permutation of their indices, on the documents' device: of equal scores the document that
            comes first in it is the better one. Default: the lower index.

    Returns:
        scores fp32 and indices int64, both [queries, min(k, documents)], best first.

    Raises:
        ValueError: there are no documents, or an embedding is not finite.
    """
    if not len(documents):
        raise ValueError("no documents to search")
    total = len(documents)
    sought = _normalized(queries)
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, total, block):
        rows = documents[start : start + block] if order is None else documents[order[start : start + block]]
        there = _normalized(rows.to(queries.device))
        places = torch.arange(start, start + len(there), device=queries.device)
        found = [
            torch.cat([best[first : first + block], _keys(part @ there.T, places)], dim=1)
            .topk(min(k, start + len(there)), dim=1)
            .values
            for first, part in _parts(sought, block)
        ]
        best = torch.cat(found) if found else best.new_empty(0, min(k, total))
    scores, places = _scores_and_places(best)
    return scores, places if order is None else order.to(places.device)[places]


def retrieval_scores(
    query_ids: Sequence[str],
    query_embeddings: Tensor,
    document_ids: Sequence[str],
    document_embeddings: Tensor,
    qrels: Mapping[str, Mapping[str, int]],
) -> dict[str, float]:
    """What mteb reports for embeddings: means over queries, from an exact search by cosine similarity.

    Documents of equal score are put in descending order of their ids, as trec_eval does it.

    Args:
        query_ids: which queries; each needs an entry in `qrels`.
        query_embeddings: floating [queries, width].
        document_ids: of the corpus, each once.
        document_embeddings: floating [documents, width].
        qrels: for each query the judged documents' grades; those above 0 are relevant. A query without any scores 0.

    Returns:
        `ndcg_at_10`, `mrr_at_10`, `recall_at_100`.

    Raises:
        ValueError: ids and embeddings differ in number, an id comes twice, a query is not judged, there are no queries or no
            documents, or an embedding is not finite.
    """
    for what, ids, embeddings in (
        ("queries", query_ids, query_embeddings),
        ("documents", document_ids, document_embeddings),
    ):
        if len(ids) != len(embeddings):
            raise ValueError(f"{len(ids)} ids of {what}, but {len(embeddings)} embeddings")
        if len(set(ids)) != len(ids):
            raise ValueError(f"an id of the {what} comes twice")
        if not ids:
            raise ValueError(f"no {what}")
    if lost := [query for query in query_ids if query not in qrels]:
        raise ValueError(f"{len(lost)} queries are not judged, e.g. {lost[0]}")
    descending = sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)
    order = torch.tensor(descending, device=document_embeddings.device)
    _, nearest = search(query_embeddings, document_embeddings, 100, order=order)
    ranked = {
        query: [document_ids[int(index)] for index in indices]
        for query, indices in zip(query_ids, nearest.tolist(), strict=True)
    }
    return {
        "ndcg_at_10": fmean(ndcg_at(found, qrels[query], 10) for query, found in ranked.items()),
        "mrr_at_10": fmean(mrr_at(found, qrels[query], 10) for query, found in ranked.items()),
        "recall_at_100": fmean(recall_at(found, qrels[query], 100) for query, found in ranked.items()),
    }


def _normalized(embeddings: Tensor) -> Tensor:
    """Of length 1, fp64; zeros stay zeros."""
    if not embeddings.isfinite().all():
        raise ValueError("an embedding is not finite")
    return F.normalize(embeddings.double(), dim=1)


def _parts(rows: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(rows), size):
        yield first, rows[first : first + size]


def _keys(scores: Tensor, places: Tensor) -> Tensor:
    """An int64 for each score [queries, documents]: it grows with the score, and for equal ones falls with the place.

    All of a row differ, so that `topk`, which leaves open which of equal values it returns, has nothing to choose.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # of 0 and -0 only 0
    # The bits of positive floats are ordered as integers are; those of negative ones the other way round.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (_LOW_BITS - places)


def _scores_and_places(keys: Tensor) -> tuple[Tensor, Tensor]:
    """What `_keys` was made of."""
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32), _LOW_BITS - (keys & _LOW_BITS)
