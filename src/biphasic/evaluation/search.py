"""Search embeddings exactly, write rankings in TREC's run format, and compute retrieval metrics with trec_eval."""

from __future__ import annotations

import gzip
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
    or without TF32, at any position in a block, unless the terms cancel to 1e-9 of them. Of equal scores, the lower position
    ranks first. An fp32 product chooses the sums that are needed: those that the bound on its error can't exclude from the
    query's best. A query with many of them in a block is compared with the whole block in fp64.

    `queries` are floating [queries, width]; documents are moved to their device. `similarity` is `cosine` or `dot`.
    """

    def __init__(self, queries: Tensor, k: int, similarity: str = "cosine", block: int = _BLOCK):
        self._k, self._block, self._cosine = k, block, similarity == "cosine"
        self._queries = self._to_fp64(queries)
        self._lengths = _in_range(self._queries.norm(dim=1))
        self._scaled = (self._queries / self._lengths[:, None]).float().nan_to_num()
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
            longest = block.new_ones(()) if self._cosine else _in_range(block.norm(dim=1).amax())
            scaled = (block if self._cosine else (block / longest).nan_to_num()).float()
            positions = torch.arange(first + start, first + start + len(block), device=block.device)
            best: list[Tensor] = []
            for at in range(0, len(self._queries), self._block):
                part = slice(at, at + self._block)
                allowed = None if mask is None else mask[part, start : start + len(rows)].to(block.device)
                best.append(self._compare(part, block, scaled, longest, positions, allowed))
            self._best = torch.cat(best) if best else self._best

    def _compare(
        self, part: slice, block: Tensor, scaled: Tensor, longest: Tensor, positions: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """Return the best keys of a part of the queries, int64 [queries, at most k], so far and in a block.
        `scaled` is `block` over `longest`, in fp32: at most of length 1, as the scaled queries."""
        best, queries, scale = self._best[part], self._queries[part], self._lengths[part] * longest
        numbers, error = torch.arange(len(best) + 1, device=block.device), _fp32_error(block.shape[1])
        product = _fp32_product(self._scaled[part], F.pad(scaled, (0, 0, 0, -len(block) % 8)))
        product[:, len(block) :] = -torch.inf
        if allowed is not None:
            product[:, : len(block)].masked_fill_(~allowed, -torch.inf)
        # First the peaks of eight documents: looking at each takes long. k documents are at least as near as the k-th.
        peaks, worst = product.view(len(best), 8, -1).amax(1), torch.full_like(scale[:, None], -torch.inf)
        if best.shape[1] == self._k:
            worst = _scores(best.amin(1, keepdim=True))
        elif allowed is None and peaks.shape[1] >= self._k:
            worst = (peaks.topk(self._k, dim=1).values[:, -1:].double() - error) * scale[:, None]
        # The least product of scaled vectors of the worst score; -2 is below all. fp32 makes scores equal that lie far
        # apart on this scale: near 0 and beyond its largest number.
        lowest = worst.double().clamp(max=torch.finfo(torch.float32).max) - 2.0**-149
        least = (lowest / scale[:, None] - error).nan_to_num(-2.0, torch.inf, -2.0).clamp(min=-2.0).float()
        query, peak = (peaks >= least).nonzero().T.contiguous()
        many = torch.searchsorted(query, numbers).diff() > peaks.shape[1] // 2
        query, peak = query[~many[query]], peak[~many[query]]
        eight = peak[:, None] + torch.arange(0, product.shape[1], peaks.shape[1], device=block.device)
        which, at = (product[query[:, None], eight] >= least[query]).nonzero().unbind(1)
        query, column = query[which], eight[which, at]
        begins, width = torch.searchsorted(query, numbers), min(self._k, best.shape[1] + len(block))
        sums = _pair_sums(queries, block, begins, column).float()[:, None]
        keys = _keys(sums, positions[column, None])
        found = best.new_full((len(best), max(int(begins.diff().max()), width - best.shape[1])), _EMPTY)
        found[query, torch.arange(len(query), device=block.device) - begins[query]] = keys[:, 0]
        nearest = torch.cat([best, found], dim=1).topk(width, dim=1, sorted=False).values
        if many.any():
            keys = _keys((queries[many] @ block.T).float(), positions)
            keys = keys if allowed is None else keys.masked_fill(~allowed[many], _EMPTY)
            nearest[many] = torch.cat([best[many], keys], dim=1).topk(width, dim=1, sorted=False).values
        return nearest

    def merge(self, gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Merge the results of all ranks; `gather` returns the tensors of all ranks, whose widths may differ."""
        best = torch.cat(gather(self._best), dim=1)
        self._best = best.topk(min(self._k, best.shape[1]), dim=1).values

    def result(self) -> tuple[Tensor, Tensor]:
        """Return scores fp32 and positions int64, both [queries, at most k], best first; missing positions are -1."""
        best = self._best.sort(dim=1, descending=True).values
        return _scores(best), torch.where(best == _EMPTY, -1, _LOW_BITS - (best & _LOW_BITS))

    def ranking(self, query_ids: Sequence[str], document_ids: Sequence[str]) -> Run:
        """Return the result by id; `document_ids` are in the order of the positions."""
        scores, positions = (part.tolist() for part in self.result())
        return {
            query: [(document_ids[int(position)], score) for position, score in zip(*row, strict=True) if position >= 0]
            for query, *row in zip(query_ids, positions, scores, strict=True)
        }

    def _to_fp64(self, embeddings: Tensor) -> Tensor:
        """Convert to fp64 and, for cosine similarity, normalize to length 1; zeros stay zeros."""
        if not (embeddings.sum().isfinite() or embeddings.isfinite().all()):  # the sum is faster, but may overflow
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


def _in_range(lengths: Tensor) -> Tensor:
    """Replace lengths whose squares fp64 may not hold, and 0, by NaN: their products have no bound."""
    return torch.where((lengths > 1e-140) & (lengths < 1e140), lengths, torch.nan)


def _fp32_error(width: int) -> float:
    """Return a bound on the error of `_fp32_product` of vectors of at most length 1 that were rounded to fp32.

    A sum of n products errs by at most n u / (1 - n u) times the lengths' product, for the unit roundoff u, in any order,
    with or without fused multiply-add (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). n is the
    width and 8: 5 roundings, of the vectors, the scores and their limits, and more than underflow and fp64's errors.
    """
    return (width + 8) / (2**24 - (width + 8))


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` in IEEE's fp32, whatever autocast and the settings of TF32 and bf16 say."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(left.device.type, enabled=False))
        for setting in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # pyright: ignore[reportAttributeAccessIssue]
            stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
            setting.fp32_precision = "ieee"
        return left @ right.T


def _pair_sums(queries: Tensor, block: Tensor, begins: Tensor, column: Tensor) -> Tensor:
    """Return the products of query i and the rows `column[begins[i]:begins[i + 1]]` of a block, fp64 [pairs]."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        size, zeros = (len(queries), len(block)), queries.new_zeros(len(column))
        pairs = torch.sparse_csr_tensor(begins, column, zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(pairs, queries, block.T).values()


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """Return an int64 key for each score, fp32 [queries, documents], which increases with the score and, for equal scores,
    decreases with the position. The keys in a row are distinct, so that the result of `topk` is unique."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    # The bits of positive floats have the order of integers; those of negative floats have the reverse order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (_LOW_BITS - positions)


def _scores(keys: Tensor) -> Tensor:
    """Return the scores of keys, fp32; that of `_EMPTY` is NaN."""
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
