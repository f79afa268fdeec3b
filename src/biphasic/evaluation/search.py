"""Exact search among embeddings, and what it scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from biphasic.evaluation.metrics import mrr_at, ndcg_at, recall_at

_LOW_BITS = (1 << 32) - 1
_NOTHING = -(1 << 63)
"""Below every key: the bits of no finite score."""


class Nearest:
    """The k documents nearest to each query, all of them compared, of documents that come a block at a time.

    No more than `block` x `block` similarities exist at once, and of the documents nothing is kept: memory doesn't grow with
    the corpus. Similarities are summed in fp64, then rounded to fp32, so that what should be equal is: on every device, with
    TF32 allowed or not, wherever a document lies in its block. Of equal ones the lower place is the better.

    Args:
        queries: floating [queries, width]; everything is compared on its device.
        k: how many.
        similarity: `cosine`, or `dot`.
        block: queries and documents that are compared at a time.
    """

    def __init__(self, queries: Tensor, k: int, similarity: str = "cosine", block: int = 2048):
        self._k, self._block, self._cosine = k, block, similarity == "cosine"
        self._sought = self._comparable(queries)
        self._best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)

    def add(self, documents: Tensor, first: int, wanted: Tensor | None = None) -> None:
        """Compare more documents.

        Args:
            documents: floating [documents, width], on any device; blocks of it are moved.
            first: the place of the first one; no place may come twice.
            wanted: bool [queries, documents]: which documents are compared with which query. Default: all.

        Raises:
            ValueError: an embedding is not finite.
        """
        for start, rows in _parts(documents, self._block):
            there = self._comparable(rows.to(self._sought.device))
            places = torch.arange(first + start, first + start + len(there), device=there.device)
            found: list[Tensor] = []
            for at, part in _parts(self._sought, self._block):
                keys = _keys(part @ there.T, places)
                if wanted is not None:
                    some = wanted[at : at + self._block, start : start + self._block].to(keys.device)
                    keys = keys.masked_fill(~some, _NOTHING)
                found.append(self._better(self._best[at : at + self._block], keys))
            self._best = torch.cat(found) if found else self._best

    def merge(self, others: Callable[[Tensor], list[Tensor]]) -> None:
        """Take what other processes found.

        Args:
            others: gathers every process's tensor, all of the same shape.
        """
        short = self._k - self._best.shape[1]
        self._best = F.pad(self._best, (0, short), value=_NOTHING) if short > 0 else self._best
        self._best = torch.cat(others(self._best), dim=1).topk(self._k, dim=1).values

    def result(self) -> tuple[Tensor, Tensor]:
        """Scores fp32 and places int64, both [queries, at most k], best first; a place of -1 where there are fewer."""
        scores, places = _scores_and_places(self._best)
        return scores, torch.where(self._best == _NOTHING, -1, places)

    def _better(self, best: Tensor, keys: Tensor) -> Tensor:
        """The best k of both."""
        if best.shape[1] == self._k:
            # After the first blocks few documents are any better, and sorting all of them would be most of the work.
            some = int((keys > best[:, -1:]).sum(1).max()) if len(keys) else 0
            if not some:
                return best
            keys = keys.topk(some, dim=1).values
        both = torch.cat([best, keys], dim=1)
        return both.topk(min(self._k, both.shape[1]), dim=1).values

    def _comparable(self, embeddings: Tensor) -> Tensor:
        """fp64; for cosines of length 1, where zeros stay zeros."""
        if not embeddings.isfinite().all():
            raise ValueError("an embedding is not finite")
        return F.normalize(embeddings.double(), dim=1) if self._cosine else embeddings.double()


def search(
    queries: Tensor, documents: Tensor, k: int, block: int = 2048, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k documents nearest to each query by cosine similarity, of documents in memory; see `Nearest`.

    Args:
        queries: floating [queries, width]; the results are on its device.
        documents: floating [documents, width], on any device.
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
    nearest = Nearest(queries, min(k, len(documents)), block=block)
    for start in range(0, len(documents), block):
        rows = documents[start : start + block] if order is None else documents[order[start : start + block]]
        nearest.add(rows, start)
    scores, places = nearest.result()
    if not len(queries):
        places = places.new_empty(0, min(k, len(documents)))
        return scores.new_empty(places.shape), places
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
