"""Exact search a block at a time, in any order, on several ranks, in constant memory; and its scores against mteb's."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores
from torch import Tensor

from biphasic.evaluation import search as module
from biphasic.evaluation.search import ExactTopK, rank_documents, retrieval_scores

WIDTH = 12


def random_embeddings(seed: int, count: int, documents: int, kinds: int | None = None) -> tuple[Tensor, Tensor]:
    """Vectors of different lengths; `kinds` is the number of different documents, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(count, WIDTH, generator=generator)
    different = torch.randn(kinds or documents, WIDTH, generator=generator)
    which = torch.arange(documents) if kinds is None else torch.randint(kinds, (documents,), generator=generator)
    lengths = 2.0 ** torch.randint(-2, 3, (documents, 1), generator=generator)  # exact
    return queries, different[which] * (lengths if kinds is None else 1)


def full_sort(queries: Tensor, documents: Tensor, k: int, similarity: str, mask: Tensor | None = None) -> list[list[int]]:
    """Return the best k positions from the full matrix; of equal scores the lower position first."""
    if similarity == "cosine":
        queries, documents = (F.normalize(x.double(), dim=1) for x in (queries, documents))
    matrix = (queries.double() @ documents.double().T).float().tolist()
    best = []
    for row, scores in enumerate(matrix):
        positions = [at for at in range(len(scores)) if mask is None or mask[row, at]]
        best.append(sorted(positions, key=lambda at: (-scores[at], at))[:k])
    return best


def without_missing(positions: Tensor) -> list[list[int]]:
    """Remove the -1s, which come last."""
    kept = [[position for position in row if position >= 0] for row in positions.tolist()]
    assert positions.tolist() == [row + [-1] * (positions.shape[1] - len(row)) for row in kept]
    return kept


def shuffled(count: int, block: int, seed: int) -> list[tuple[int, int]]:
    """Return the bounds of blocks, in random order."""
    starts = [first for first in range(0, count, block)]
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(starts[at], min(starts[at] + block, count)) for at in order]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("kinds", [None, 7])
@pytest.mark.parametrize(("k", "block", "inner"), [(1, 10, 1), (10, 33, 8), (10, 200, 64), (100, 17, 2048), (500, 50, 7)])
def test_blocks_in_any_order(similarity: str, kinds: int | None, k: int, block: int, inner: int) -> None:
    queries, documents = random_embeddings(0, 9, 200, kinds)
    expected = full_sort(queries, documents, k, similarity)
    results = []
    for seed in range(3):
        nearest = ExactTopK(queries, k, similarity, block=inner)
        for first, end in shuffled(200, block, seed):
            nearest.add(documents[first:end], first)
        scores, positions = nearest.result()
        assert (scores.dtype, positions.dtype) == (torch.float32, torch.int64)
        assert scores.shape == positions.shape == (9, min(k, 200))
        assert positions.tolist() == expected
        results.append(scores)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    compare = F.cosine_similarity if similarity == "cosine" else lambda a, b, dim: (a * b).sum(dim)
    full = compare(queries[:, None].double(), documents[None].double(), dim=2)
    torch.testing.assert_close(results[0], full.sort(dim=1, descending=True).values[:, :k].float(), atol=1e-5, rtol=1e-6)


def test_negative_zero_and_opposite_scores_are_ordered() -> None:
    documents = torch.tensor([[-1.0, 0.0], [-0.0, 1.0], [-1.0, 5.0], [0.0, 1.0], [-5.0, 1.0], [1.0, 0.0], [-0.0, -1.0]])
    nearest = ExactTopK(torch.tensor([[1.0, 0.0]]), 7, block=2)
    nearest.add(documents, 0)
    scores, positions = nearest.result()
    assert positions.tolist() == [[5, 1, 3, 6, 2, 4, 0]]
    expected = torch.tensor([[1.0, 0, 0, 0, -1 / 26**0.5, -5 / 26**0.5, -1]])
    torch.testing.assert_close(scores, expected, atol=1e-7, rtol=0)
    # Scores too small for fp32 are 0, on either side.
    nearest = ExactTopK(torch.tensor([[1.0, 0.0]], dtype=torch.float64), 3)
    nearest.add(torch.tensor([[-1e-60, 1.0], [1e-60, 1.0], [0.0, 1.0]], dtype=torch.float64), 0)
    assert nearest.result()[1].tolist() == [[0, 1, 2]]


def test_number_type_does_not_matter() -> None:
    queries, documents = (part.bfloat16() for part in random_embeddings(5, 30, 500, kinds=300))
    positions = []
    for dtype in (torch.bfloat16, torch.float32):
        nearest = ExactTopK(queries.to(dtype), 60)
        nearest.add(documents.to(dtype), 0)
        positions.append(nearest.result()[1])
    assert torch.equal(*positions)


def test_similarities_exist_for_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def seen(function: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
        result = function(*given)
        sizes.append(result.shape)
        return result

    for name in ("_keys", "_fp32_product"):
        monkeypatch.setattr(module, name, partial(seen, getattr(module, name)))
    queries, documents = random_embeddings(7, 20, 50)
    monkeypatch.setattr(module, "_QUERIES", 8)
    nearest = ExactTopK(queries, 5, block=8)
    nearest.add(documents, 0)
    assert len(sizes) >= 2 * 3 * 7 - 3 and max(max(size) for size in sizes if len(size) == 2) == 8
    assert max(size.numel() for size in sizes) <= 8 * 8
    # Between blocks it holds the queries, also in fp32, their lengths, and the best k of each.
    held = [value for value in vars(nearest).values() if isinstance(value, Tensor)]
    assert sorted(tensor.numel() for tensor in held) == [20, 20 * 5, 20 * WIDTH, 20 * WIDTH]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_are_refused(value: float) -> None:
    queries, documents = random_embeddings(8, 3, 4)
    documents[3, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        ExactTopK(queries, 2, block=2).add(documents, 0)
    with pytest.raises(ValueError, match="not finite"):
        ExactTopK(documents, 2)


def test_dot_depends_on_lengths_and_cosine_does_not() -> None:
    query = torch.tensor([[2.0, 0.0]])
    documents = torch.tensor([[1.0, 0.0], [3.0, 3.0], [-5.0, 1.0], [0.0, 0.0]])
    for similarity, positions, scores in (("dot", [1, 0, 3, 2], [6.0, 2.0, 0.0, -10.0]),
                                       ("cosine", [0, 1, 3, 2], [1.0, 0.5**0.5, 0.0, -5 / 26**0.5])):  # fmt: skip
        nearest = ExactTopK(query, 4, similarity)
        nearest.add(documents, 0)
        result = nearest.result()
        assert result[1].tolist() == [positions]
        torch.testing.assert_close(result[0], torch.tensor([scores]))


@pytest.mark.parametrize("block", [3, 50, 2048])
@pytest.mark.parametrize("k", [1, 6, 40])
def test_each_query_is_compared_with_the_documents_of_its_mask(k: int, block: int) -> None:
    queries, documents = random_embeddings(1, 7, 60, kinds=20)
    generator = torch.Generator().manual_seed(2)
    # The first query has no documents, the sixth all.
    mask = torch.rand(7, 60, generator=generator) < torch.tensor([0, 0.05, 0.2, 0.5, 0.9, 1, 0.1])[:, None]
    expected = full_sort(queries, documents, k, "cosine", mask)
    assert expected[0] == [] and len(expected[5]) == k
    nearest = ExactTopK(queries, k, block=block)
    for first, end in shuffled(60, 11, 0):
        nearest.add(documents[first:end], first, mask[:, first:end])
    assert without_missing(nearest.result()[1]) == expected


def gather_from(ranks: list[ExactTopK]) -> Callable[[Tensor], list[Tensor]]:
    """Return a `gather` for these ranks."""
    sent = [rank._best for rank in ranks]

    def gather(best: Tensor) -> list[Tensor]:
        assert any(best is part for part in sent)
        return sent

    return gather


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("count", "world", "block"), [(90, 2, 16), (90, 4, 7), (90, 3, 90), (5, 4, 1), (3, 4, 2), (1, 3, 4)]
)
@pytest.mark.parametrize("k", [1, 10, 100])
def test_several_ranks_find_what_one_finds(count: int, world: int, block: int, k: int, similarity: str) -> None:
    """Blocks are dealt to ranks in turn, so that the last ranks have fewer documents than k, or none."""
    queries, documents = random_embeddings(3, 6, count, kinds=max(count // 3, 1))
    alone = ExactTopK(queries, k, similarity)
    ranks = [ExactTopK(queries, k, similarity) for _ in range(world)]
    for number, first in enumerate(range(0, count, block)):
        rows = documents[first : first + block]
        alone.add(rows, first)
        ranks[number % world].add(rows, first)
    assert count >= 90 or any(rank._best.shape[1] < k for rank in ranks) or k == 1
    gather = gather_from(ranks)
    scores, positions = alone.result()
    for rank in ranks:
        rank.merge(gather)
        merged_scores, merged = rank.result()
        assert merged.shape == (6, min(k, count))
        assert without_missing(merged) == positions.tolist() == full_sort(queries, documents, k, similarity)
        assert torch.equal(merged_scores[:, : scores.shape[1]], scores)


def test_ranks_without_a_document_of_the_mask() -> None:
    queries, documents = random_embeddings(4, 2, 4)
    ranks = [ExactTopK(queries, 3) for _ in range(2)]
    for number, rank in enumerate(ranks):
        mask = torch.tensor([[False, False], [True, number == 0]])
        rank.add(documents[2 * number : 2 * number + 2], 2 * number, mask)
    ranks[1].merge(gather_from(ranks))
    positions = ranks[1].result()[1]
    assert positions[0].tolist() == [-1, -1, -1]
    assert sorted(positions[1].tolist()) == [0, 1, 2]


def test_no_queries_and_no_documents() -> None:
    queries, documents = random_embeddings(5, 3, 4)
    nearest = ExactTopK(queries, 5)
    assert [part.shape for part in nearest.result()] == [(3, 0), (3, 0)]
    nearest.add(documents[:0], 0)
    nearest.add(documents, 0)
    assert nearest.result()[1].shape == (3, 4)
    without_queries = ExactTopK(queries[:0], 5)
    without_queries.add(documents, 0)
    assert len(without_queries.result()[1]) == 0


MEMORY = """
import re, sys, torch
from biphasic.evaluation.search import ExactTopK
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
def peak(count):
    nearest = ExactTopK(torch.randn(50, 512, generator=generator), 50)
    for first in range(0, count, 4096):
        nearest.add(torch.randn(min(4096, count - first), 512, generator=generator), first)
    assert nearest.result()[1].shape == (50, 50)
    # getrusage would count the process that this one was forked from.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
print(peak(5_000), peak(65_000))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus() -> None:
    """60,000 more documents take 123 MB; malloc gives large blocks back at once, so what it keeps isn't counted."""
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    small, large = map(float, run.stdout.split())
    assert large - small < 10, run.stdout


def mteb_scores(
    queries: dict[str, Tensor], documents: dict[str, Tensor], qrels: dict[str, dict[str, int]]
) -> dict[str, float]:
    """Return mteb's scores from the score of every document."""
    matrix = torch.stack(list(documents.values())).double()
    runs = {
        query: dict(zip(documents, F.cosine_similarity(embedding.double(), matrix).float().tolist(), strict=True))
        for query, embedding in queries.items()
    }
    scores = calculate_retrieval_scores(runs, qrels, [10, 100])
    assert scores.all_scores.keys() == queries.keys()
    return {
        "ndcg_at_10": sum(values["ndcg_cut_10"] for values in scores.all_scores.values()) / len(queries),
        "mrr_at_10": scores.mrr["MRR@10"],
        "recall_at_100": sum(values["recall_100"] for values in scores.all_scores.values()) / len(queries),
    }


@pytest.mark.parametrize(("seed", "count", "kinds"), [(0, 300, 300), (1, 300, 20), (2, 300, 2), (3, 30, 30), (4, 5, 3)])
def test_scores_equal_mteb(seed: int, count: int, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with many equal documents, across the ranks 10 and 100."""
    generator = torch.Generator().manual_seed(seed)
    queries, different = random_embeddings(seed, 25, kinds)
    # Ids whose order as texts isn't that of numbers, nor that of the corpus, and not all in ASCII.
    names = [f"{'dDé€😀'[int(number) % 5]}{int(number)}" for number in torch.randperm(count, generator=generator)]
    documents = different[torch.randint(kinds, (count,), generator=generator)]
    ids = [f"q{number}" for number in range(25)]
    qrels = {}
    for query in ids:
        judged = torch.randperm(count, generator=generator)[: int(torch.randint(1, 30, (1,), generator=generator))]
        grades = torch.randint(0, 4, (len(judged),), generator=generator).tolist()
        qrels[query] = {names[int(document)]: grade for document, grade in zip(judged, grades, strict=True)}
    qrels["q0"] = dict.fromkeys(qrels["q0"], 0)  # nothing relevant
    qrels["q1"] = {"not in the corpus": 1, names[0]: 2}
    qrels["not a query"] = {names[0]: 1}
    expected = mteb_scores(dict(zip(ids, queries, strict=True)), dict(zip(names, documents, strict=True)), qrels)
    for block in (7, 2048):
        monkeypatch.setattr("biphasic.evaluation.search._BLOCK", block)
        scores = retrieval_scores(rank_documents(ids, queries, names, documents), qrels)
        # mteb rounds its means to five places, but not the queries' own scores.
        assert scores == pytest.approx(expected, abs=1e-5)
        assert scores["ndcg_at_10"] == pytest.approx(expected["ndcg_at_10"], abs=1e-9)
    assert 0 < scores["ndcg_at_10"] < 1


def test_scores_by_hand() -> None:
    # Ranked: c (grade 0), a (3), d (not judged), b (1).
    documents = torch.tensor([[3.0, 1.0], [0.0, 1.0], [1.0, 0.0], [2.0, 1.0]])
    qrels = {"q": {"a": 3, "b": 1, "c": 0, "e": 2}}
    scores = retrieval_scores(rank_documents(["q"], torch.tensor([[1.0, 0.0]]), list("abcd"), documents), qrels)
    gain = 3 / math.log2(3) + 1 / math.log2(5)
    best = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert scores == pytest.approx({"ndcg_at_10": gain / best, "mrr_at_10": 1 / 2, "recall_at_100": 2 / 3}, abs=1e-9)
    # The first relevant document is the eleventh, and the last one the hundred and first.
    angles = torch.arange(101.0) / 100
    documents = torch.stack([angles.cos(), angles.sin()], dim=1)
    names = [f"d{number}" for number in range(101)]
    qrels = {"q": {"d10": 1, "d100": 1}}
    scores = retrieval_scores(rank_documents(["q"], torch.tensor([[1.0, 0.0]]), names, documents), qrels)
    assert scores == {"ndcg_at_10": 0.0, "mrr_at_10": 0.0, "recall_at_100": 0.5}
