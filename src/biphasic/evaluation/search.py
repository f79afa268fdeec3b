"""Search embeddings exactly, write rankings in TREC's run format, and compute retrieval metrics with trec_eval."""

import gzip
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RANKED = 100
"""Number of documents in a ranking, as recall@100 needs."""
Run = dict[str, list[tuple[str, float]]]
"""Ids and scores of each query's documents, best first."""
Qrels = dict[str, dict[str, int]]
"""Grades of each query's judged documents; grades above 0 are relevant."""
_Rounded = tuple[Tensor, Tensor]
"""Vectors in bf16, and the lengths of what rounding changed."""
_BLOCK, _QUERIES = 4096, 2048
"""Number of documents, and of queries, that are compared at a time."""
_LOW_BITS = (1 << 32) - 1
_EMPTY = -(1 << 63)
"""A value below every key, because no finite score has these bits."""


class ExactTopK:
    """Finds the k nearest documents of each query by comparing all documents, which are added block by block.

    At most 2048 x `block` similarities exist at once and no document is kept: memory doesn't grow with the corpus.
    Similarities are summed in fp64 and rounded to fp32, so that equal documents get equal scores on every device, with
    or without TF32, at any position in a block, unless the terms cancel to 1e-9 of them. Of equal scores, the lower position
    ranks first. An fp32 product chooses the sums that are needed: those that the bound on its error can't exclude from the
    query's best. Where products of bf16 are faster, one of rounded vectors chooses, as long as that adds few sums. A query
    with many of them in a block is compared with the whole block in fp64.

    `queries` are floating [queries, width]; documents are moved to their device. `similarity` is `cosine` or `dot`.
    """

    def __init__(self, queries: Tensor, k: int, similarity: str = "cosine", block: int = _BLOCK):
        self._k, self._block, self._cosine = k, block, similarity == "cosine"
        self._queries = self._to_fp64(queries)
        self._lengths = _in_range(self._queries.norm(dim=1))
        self._scaled = (self._queries / self._lengths[:, None]).float().nan_to_num()
        self._rounds = _multiplies_bf16_faster(queries.device)
        self._best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)

    def add(self, documents: Tensor, first: int, mask: Tensor | None = None) -> None:
        """Compare more documents, floating [documents, width], with the queries.

        `first` is the position of the first document; each position may be added once. `mask`, bool [queries,
        documents], selects the documents to compare with each query. Raises a ValueError if an embedding is not finite.
        """
        for start in range(0, len(documents), self._block):
            rows = documents[start : start + self._block].to(self._queries.device)
            scaled, longest = self._scale(rows)
            allowed = None if mask is None else mask[:, start : start + len(rows)].to(rows.device)
            parts = [slice(at, at + _QUERIES) for at in range(0, len(self._queries), _QUERIES)]
            rounded = _round_to_bf16(scaled) if self._rounds else None
            chosen = [self._candidates(part, scaled, rounded, longest, allowed) for part in parts]
            used = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
            for _, column, many in chosen:
                used[column] = True
                used |= many.any()  # such queries are compared with all rows
            block, place = self._to_fp64(rows[used]), used.cumsum(0) - 1
            best, width = [], min(self._k, self._best.shape[1] + len(rows))
            for part, (query, column, many) in zip(parts, chosen, strict=True):
                least = width - self._best.shape[1]
                found = self._pair_keys(part, block, place[column], query, first + start + column, least)
                nearest = _largest(self._best[part], found, width)
                if many.any():
                    found = self._block_keys(part, many, block, first + start, allowed)
                    nearest[many] = _largest(self._best[part][many], found, width)
                best.append(nearest)
            self._best = torch.cat(best) if best else self._best

    def _scale(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows in fp32, of lengths up to 1 but for rounding, and what they were divided by: fp64 [], 1 for cosine."""
        if rows.dtype != torch.float64:
            rows = rows.float()
            lengths = rows.norm(dim=1)
            least, longest = lengths.aminmax()
            if least > 1e-15 and longest < 1e15:  # no square in a sum of fp32 is too small or too large
                lengths = lengths[:, None] if self._cosine else longest
                return rows / lengths, lengths.new_ones((), dtype=torch.float64) if self._cosine else longest.double()
        block = self._to_fp64(rows)
        longest = block.new_ones(()) if self._cosine else _in_range(block.norm(dim=1).amax())
        return (block if self._cosine else (block / longest).nan_to_num()).float(), longest

    def _candidates(
        self, part: slice, scaled: Tensor, rounded: _Rounded | None, longest: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the pairs of a part of the queries and a block's documents that may be among the best: both numbers, int64
        [pairs], by query, and which queries, bool [queries], have too many, which are left out."""
        best, queries, scale = self._best[part], self._scaled[part], (self._lengths[part] * longest)[:, None]
        allowed, few = None if allowed is None else allowed[part], len(queries) * len(scaled) // 32
        chosen = None
        if rounded is not None and self._rounds:
            chosen = self._choose_rounded(best, queries, rounded, scale, allowed)
        if chosen is None or len(chosen) > few:
            fewer = self._choose(best, queries, scaled, scale, allowed)
            self._rounds = self._rounds and (chosen is None or len(chosen) - len(fewer) <= few)
            chosen = fewer
        query = chosen // len(scaled)
        many = query.bincount(minlength=len(best)) > len(scaled) // 8
        if many.any():
            chosen = chosen[~many[query]]
            query = chosen // len(scaled)
        return query, chosen - query * len(scaled), many

    def _choose_rounded(
        self, best: Tensor, queries: Tensor, rounded: _Rounded, scale: Tensor, allowed: Tensor | None
    ) -> Tensor | None:
        """Choose as `_choose` by a product of vectors rounded to bf16; return None where that can't exclude half of them."""
        if best.shape[1] < self._k:
            return None
        (left, left_error), (right, right_error) = _round_to_bf16(queries), rounded
        # By the triangle inequality, for lengths up to 1.01. Tensor cores truncate sums: up to 4 times the error.
        error = 1.01 * (left_error + right_error.amax()) + 4 * _fp32_error(right.shape[1])
        least = _least_product(_scores(best.amin(1, keepdim=True)), scale, error)
        if not (least > 0).all():
            return None
        # The bits of positive floats have the order of integers, and those of negative floats are below.
        product = _bf16_product(left, right).view(torch.int16)
        if allowed is not None:
            product.masked_fill_(~allowed, -1)
        return _positions_of(product, least.bfloat16().view(torch.int16))

    def _choose(self, best: Tensor, queries: Tensor, scaled: Tensor, scale: Tensor, allowed: Tensor | None) -> Tensor:
        """Return which pairs may be among the best, by an fp32 product: query times documents plus document, int64 [pairs].

        `queries` and `scaled` are fp32 [rows, width], `scale`, fp64 [queries, 1], what their products are multiplied by.
        """
        product, error = _fp32_product(queries, scaled), _fp32_error(scaled.shape[1])
        if allowed is not None:
            product.masked_fill_(~allowed, -torch.inf)
        worst = torch.full_like(scale, -torch.inf)
        if best.shape[1] == self._k:
            worst = _scores(best.amin(1, keepdim=True))
        elif allowed is None and len(scaled) >= self._k:
            # k documents are at least as near as the k-th of the largest in groups of up to eight.
            size = min(8, len(scaled) // self._k)
            largest = product[:, : len(scaled) // size * size].view(len(best), size, -1).amax(1)
            worst = (largest.topk(self._k, dim=1).values[:, -1:].double() - error) * scale
        return _positions_of(product, _least_product(worst, scale, error))

    def _pair_keys(self, part: slice, block: Tensor, row: Tensor, query: Tensor, position: Tensor, least: int) -> Tensor:
        """Return the keys of pairs, sorted by query, as int64 [queries of the part, most pairs of one], the rest `_EMPTY`.

        There are at least `least` columns. `block` is fp64 [documents, width]; `row` says which is a pair's document,
        `position` where that is in the corpus.
        """
        queries = self._queries[part]
        begins = torch.searchsorted(query, torch.arange(len(queries) + 1, device=query.device))
        keys = _keys(_pair_sums(queries, block, begins, row).float(), position)
        found = keys.new_full((len(queries), max(int(begins.diff().max()), least)), _EMPTY)
        found[query, torch.arange(len(query), device=query.device) - begins[query]] = keys
        return found

    def _block_keys(self, part: slice, many: Tensor, block: Tensor, first: int, allowed: Tensor | None) -> Tensor:
        """Return the keys of some of a part's queries, `many`, for all documents of a block: int64 [queries, documents]."""
        scores = (self._queries[part][many] @ block.T).float()
        keys = _keys(scores, torch.arange(first, first + len(block), device=block.device))
        return keys if allowed is None else keys.masked_fill(~allowed[part][many], _EMPTY)

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
    Raises a ValueError if an embedding is not finite.
    """
    order = sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)
    nearest = ExactTopK(queries, RANKED, block=_BLOCK)
    for first in range(0, len(order), _BLOCK):
        nearest.add(documents[order[first : first + _BLOCK]], first)
    return nearest.ranking(query_ids, [document_ids[row] for row in order])


def best_documents(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the best 100 documents in trec_eval's order: equal scores in descending order of their ids."""
    return sorted(scores.items(), key=lambda document: (document[1], document[0]), reverse=True)[:RANKED]


def trec_run(run: Run) -> bytes:
    """Return a ranking in trec_eval's format, `query Q0 document rank score biphasic`, compressed by gzip.

    White space in an id is percent-encoded, because it separates the fields, and so is `%`. Scores have the nine digits of
    fp32. Equal rankings give equal bytes.
    """

    def field(name: str) -> str:
        return re.sub(r"[\s%]", lambda character: quote(character[0]), name)

    lines = [
        f"{field(query)} Q0 {field(document)} {rank} {score:.9g} biphasic\n"
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
    # trec_eval's reciprocal rank has no cutoff, so each ranking is truncated first.
    measures = {
        "ndcg_at_10": ("ndcg_cut_10", 10),
        "mrr_at_10": ("recip_rank", 10),
        "recall_at_100": ("recall_100", RANKED),
    }
    return {name: fmean(scores_by_query(run, qrels, *measure).values()) for name, measure in measures.items()}


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


def _in_range(lengths: Tensor) -> Tensor:
    """Replace lengths whose squares fp64 may not hold, and 0, by NaN: their products have no bound."""
    return torch.where((lengths > 1e-140) & (lengths < 1e140), lengths, torch.nan)


def _fp32_error(width: int) -> float:
    """Return a bound on the error of `_fp32_product` of vectors that were scaled to at most length 1 and rounded to fp32.

    A sum of n products errs by at most n u / (1 - n u) times the lengths' product, for the unit roundoff u, in any order,
    with or without fused multiply-add (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1); a length
    in fp32, whose root halves that, by (n / 2 + 1) u. n is the width. 12 more are 6 roundings, of the vectors, the scores
    and their limits, and more than underflow and fp64's errors.
    """
    count = 1.5 * width + 12
    return count / (2**24 - count)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` in IEEE's fp32, whatever autocast and the settings of TF32 and bf16 say."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(left.device.type, enabled=False))
        for setting in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # pyright: ignore[reportAttributeAccessIssue]
            stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
            setting.fp32_precision = "ieee"
        return left @ right.T


def _multiplies_bf16_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def _round_to_bf16(vectors: Tensor) -> _Rounded:
    """Return fp32 vectors in bf16, and the lengths of what rounding changed, fp64 [rows, 1]."""
    rounded = vectors.bfloat16()
    return rounded, (vectors - rounded).norm(dim=1, keepdim=True).double()


def _bf16_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` of bf16 vectors, summed in fp32 and rounded to bf16."""
    setting, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    before = getattr(setting, name)
    setattr(setting, name, False)
    try:
        return left @ right.T
    finally:
        setattr(setting, name, before)


def _least_product(worst: Tensor, scale: Tensor, error: Tensor | float) -> Tensor:
    """Return the least product of scaled vectors whose score may be `worst` or more, fp32 [queries, 1]; -2 is below all.

    fp32 makes scores equal that lie far apart on the scale of products: near 0 and beyond its largest number.
    """
    lowest = worst.double().clamp(max=torch.finfo(torch.float32).max) - 2.0**-149
    return (lowest / scale - error).nan_to_num(-2.0, torch.inf, -2.0).clamp(min=-2.0).float()


def _largest(best: Tensor, found: Tensor, width: int) -> Tensor:
    return torch.cat([best, found], dim=1).topk(width, dim=1, sorted=False).values


def _positions_of(products: Tensor, least: Tensor) -> Tensor:
    """Return where flattened products are at least their row's least, int64. NumPy is several times faster on the CPU."""
    if products.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(products.numpy() >= least.numpy()))
    return (products >= least).flatten().nonzero()[:, 0]


def _pair_sums(queries: Tensor, block: Tensor, begins: Tensor, column: Tensor) -> Tensor:
    """Return the products of query i and the rows `column[begins[i]:begins[i + 1]]` of a block, fp64 [pairs]."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        size, zeros = (len(queries), len(block)), queries.new_zeros(len(column))
        pairs = torch.sparse_csr_tensor(begins, column, zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(pairs, queries, block.T).values()


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """Return an int64 key for each score, fp32 [..., documents], which increases with the score and, for equal scores,
    decreases with the position. A query's keys are distinct, so that the result of `topk` is unique."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    # The bits of positive floats have the order of integers; those of negative floats have the reverse order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (_LOW_BITS - positions)


def _scores(keys: Tensor) -> Tensor:
    """Return the scores of keys, fp32; that of `_EMPTY` is NaN."""
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
