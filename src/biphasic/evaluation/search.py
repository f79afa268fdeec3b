"""Search embeddings exactly, write rankings in TREC's run format, and compute retrieval metrics with trec_eval."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any
from urllib.parse import quote

import torch
import torch.nn.functional as F
from torch import Tensor

RANKED = 100
"""Number of documents in a ranking, as recall@100 needs."""
Run = dict[str, list[tuple[str, float]]]
"""Ids and scores of each query's documents, best first."""
Qrels = dict[str, dict[str, int]]
"""Grades of each query's judged documents; grades above 0 are relevant."""
_BLOCK = 2048
"""Number of queries and of documents that are compared at a time."""
_LOW_BITS = (1 << 32) - 1
_EMPTY = -(1 << 63)
"""A value below every key, because no finite score has these bits."""


class ExactTopK:
    """Finds the k nearest documents of each query by comparing all documents, which are added block by block.

    At most `block` x `block` similarities exist at once and no document is kept: memory doesn't grow with the corpus.
    Similarities are summed in fp64 and rounded to fp32, so that equal documents get equal scores on every device, with
    or without TF32, at any position in a block. Of equal scores, the lower position ranks first.

    `queries` are floating [queries, width]; documents are moved to their device. `similarity` is `cosine` or `dot`.
    `ceilings`, fp32 [queries], leaves out the documents with a higher score than the query's ceiling.
    """

    def __init__(
        self, queries: Tensor, k: int, similarity: str = "cosine", block: int = _BLOCK, ceilings: Tensor | None = None
    ):
        self._ceilings = None if ceilings is None else ceilings.to(queries.device)
        self._k, self._block, self._cosine = k, block, similarity == "cosine"
        self._queries = self._to_fp64(queries)
        self._best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)

    def add(self, documents: Tensor, first: int, mask: Tensor | None = None) -> None:
        """Compare more documents, floating [documents, width], with the queries.

        `first` is the position of the first document; each position may be added once. `mask`, bool [queries,
        documents], selects the documents to compare with each query.

        Raises:
            ValueError: an embedding is not finite.
        """
        for start, rows in _blocks(documents, self._block):
            block = self._to_fp64(rows.to(self._queries.device))
            positions = torch.arange(first + start, first + start + len(block), device=block.device)
            best: list[Tensor] = []
            for at, queries in _blocks(self._queries, self._block):
                scores = (queries @ block.T).float()
                keys = _keys(scores, positions)
                if self._ceilings is not None:
                    keys = keys.masked_fill(scores > self._ceilings[at : at + self._block, None], _EMPTY)
                if mask is not None:
                    allowed = mask[at : at + self._block, start : start + self._block].to(keys.device)
                    keys = keys.masked_fill(~allowed, _EMPTY)
                best.append(self._best_of(self._best[at : at + self._block], keys))
            self._best = torch.cat(best) if best else self._best

    def merge(self, gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Merge the results of all ranks; `gather` returns the tensors of all ranks, whose widths may differ."""
        best = torch.cat(gather(self._best), dim=1)
        self._best = best.topk(min(self._k, best.shape[1]), dim=1).values

    def result(self) -> tuple[Tensor, Tensor]:
        """Return scores fp32 and positions int64, both [queries, at most k], best first; missing positions are -1."""
        ordered = (self._best >> 32).int()  # inverts `_keys`
        scores = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
        return scores, torch.where(self._best == _EMPTY, -1, _LOW_BITS - (self._best & _LOW_BITS))

    def ranking(self, query_ids: Sequence[str], document_ids: Sequence[str]) -> Run:
        """Return the result by id; `document_ids` are in the order of the positions."""
        scores, positions = (part.tolist() for part in self.result())
        return {
            query: [(document_ids[int(position)], score) for position, score in zip(*row, strict=True) if position >= 0]
            for query, *row in zip(query_ids, positions, scores, strict=True)
        }

    def _best_of(self, best: Tensor, keys: Tensor) -> Tensor:
        """Return the k largest keys of both tensors."""
        if best.shape[1] == self._k:
            # After the first blocks few documents are better, and sorting all of them would take most of the time.
            better = int((keys > best[:, -1:]).sum(1).max()) if len(keys) else 0
            if not better:
                return best
            keys = keys.topk(better, dim=1).values
        both = torch.cat([best, keys], dim=1)
        return both.topk(min(self._k, both.shape[1]), dim=1).values

    def _to_fp64(self, embeddings: Tensor) -> Tensor:
        """Convert to fp64 and, for cosine similarity, normalize to length 1; zeros stay zeros."""
        if not embeddings.isfinite().all():
            raise ValueError("an embedding is not finite")
        return F.normalize(embeddings.double(), dim=1) if self._cosine else embeddings.double()


def rank_documents(query_ids: Sequence[str], queries: Tensor, document_ids: Sequence[str], documents: Tensor) -> Run:
    """Return the best 100 documents of each query by cosine similarity.

    Embeddings are floating [rows, width]. Equal scores are ranked in descending order of the ids, as in trec_eval.

    Raises:
        ValueError: an embedding is not finite.
    """
    order = sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)
    nearest = ExactTopK(queries, RANKED, block=_BLOCK)
    for first, rows in _blocks(torch.tensor(order, device=documents.device), _BLOCK):
        nearest.add(documents[rows], first)
    return nearest.ranking(query_ids, [document_ids[row] for row in order])


def best_documents(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the best 100 documents in trec_eval's order: equal scores in descending order of their ids."""
    return sorted(scores.items(), key=lambda document: (document[1], document[0]), reverse=True)[:RANKED]


def trec_run(run: Run, tag: str) -> bytes:
    """Return a ranking in trec_eval's format, `query Q0 document rank score tag`, compressed by gzip.

    White space in an id is percent-encoded, because it separates the fields, and so is `%`. Scores have the nine digits of
    fp32. Equal rankings give equal bytes.
    """

    def field(name: str) -> str:
        return re.sub(r"[\s%]", lambda character: quote(character[0]), name)

    lines = [
        f"{field(query)} Q0 {field(document)} {rank} {score:.9g} {tag}\n"
        for query, documents in run.items()
        for rank, (document, score) in enumerate(documents, start=1)
    ]
    return gzip.compress("".join(lines).encode(), mtime=0)


def scores_by_query(run: Run, qrels: Qrels, measure: str, cutoff: int) -> dict[str, float]:
    """Return a measure of trec_eval, such as `ndcg_cut_10`, for the first `cutoff` documents of each query."""
    from pytrec_eval import RelevanceEvaluator

    rankings = {query: dict(documents[:cutoff]) for query, documents in run.items()}
    evaluator = RelevanceEvaluator({query: qrels[query] for query in run}, {measure})
    return {query: scores[measure] for query, scores in evaluator.evaluate(rankings).items()}


def query_columns(
    run: Run, qrels: Qrels, texts: Mapping[str, str], scores: Mapping[str, Mapping[str, float]]
) -> dict[str, list[Any]]:
    """Return the columns of a Parquet file with a row for each query of a ranking.

    They are `id`, `text`, `gold` (the judged documents, with `id` and `grade`), `predicted` (the ids of the ten best
    documents), and the `scores`, which are given by name and query id.
    """
    judged = [[{"id": id, "grade": grade} for id, grade in sorted(qrels[query].items())] for query in run]
    best = [[document for document, _ in documents[:10]] for documents in run.values()]
    by_name = {name: [values[query] for query in run] for name, values in scores.items()}
    return {"id": list(run), "text": [texts[query] for query in run], "gold": judged, "predicted": best, **by_name}


def retrieval_scores(run: Run, qrels: Qrels) -> dict[str, float]:
    """Return mteb's `ndcg_at_10`, `mrr_at_10` and `recall_at_100`, averaged over the queries of a ranking.

    `qrels` must have each query of the ranking. A query without a relevant document scores 0.
    """

    def mean(measure: str, cutoff: int) -> float:
        return fmean(scores_by_query(run, qrels, measure, cutoff).values())

    # trec_eval's reciprocal rank has no cutoff, so each ranking is truncated first.
    return {
        "ndcg_at_10": mean("ndcg_cut_10", 10),
        "mrr_at_10": mean("recip_rank", 10),
        "recall_at_100": mean("recall_100", RANKED),
    }


def ndcg_of_ten(run: Run, qrels: Qrels) -> dict[str, float]:
    """Return the paper's NDCG@10 (its evaluation library, EncodEval) of each query of a ranking.

    Every grade above 0 counts 1, and the ideal ranking is the best order of the ten retrieved documents, whereas trec_eval's
    is that of all relevant ones: the two are equal for queries with one relevant document. Without a relevant document
    among the ten, the score is 0.
    """
    scores = {}
    for query, documents in run.items():
        relevant = [qrels[query].get(document, 0) > 0 for document, _ in documents[:10]]
        discounts = [1 / math.log2(rank + 2) for rank in range(len(relevant))]
        gain = sum(discount for discount, is_relevant in zip(discounts, relevant, strict=True) if is_relevant)
        scores[query] = gain / sum(discounts[: sum(relevant)]) if gain else 0.0
    return scores


def _blocks(rows: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(rows), size):
        yield first, rows[first : first + size]


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """Return an int64 key for each score, fp32 [queries, documents], which increases with the score and, for equal scores,
    decreases with the position. The keys in a row are distinct, so that the result of `topk` is unique."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    # The bits of positive floats have the order of integers; those of negative floats have the reverse order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (_LOW_BITS - positions)
