"""Exact search against the full matrix, and what it scores against mteb."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores
from torch import Tensor

from biphasic.evaluation import search as module
from biphasic.evaluation.search import retrieval_scores, search


def random_embeddings(seed: int, queries: int, documents: int, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Of very different lengths, which must not matter.
    found = (torch.randn(count, width, generator=generator) for count in (queries, documents))
    first, second = (x * torch.exp(3 * torch.randn(len(x), 1, generator=generator)) for x in found)
    return first, second


@pytest.mark.parametrize("block", [1, 7, 64, 5000])
@pytest.mark.parametrize("k", [1, 10, 100])
def test_the_same_as_sorting_the_full_matrix(block: int, k: int) -> None:
    queries, documents = random_embeddings(0, 9, 150)
    scores, indices = search(queries, documents, k, block)
    full = F.cosine_similarity(queries[:, None].double(), documents[None].double(), dim=2)
    expected = full.sort(dim=1, descending=True)
    assert (scores.dtype, indices.dtype) == (torch.float32, torch.int64)
    assert torch.equal(indices, expected.indices[:, :k])
    torch.testing.assert_close(scores, expected.values[:, :k].float(), atol=1e-6, rtol=0)
    assert (scores < 0).any() or k < 100


@pytest.mark.parametrize("block", [1, 3, 10, 64])
@pytest.mark.parametrize("k", [1, 5, 12, 40])
def test_of_equal_documents_the_first_is_nearer(block: int, k: int) -> None:
    queries, kinds = random_embeddings(1, 4, 6)
    kinds[2] = 0  # similar to nothing: 0, wherever it lies
    kinds[3] = -kinds[1]
    which = torch.randint(6, (40,), generator=torch.Generator().manual_seed(2))
    lengths = 2.0 ** torch.randint(-3, 4, (40, 1), generator=torch.Generator().manual_seed(3))  # exact
    documents = kinds[which] * lengths
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    similar = F.cosine_similarity(queries[:, None].double(), kinds[None].double(), dim=2)
    for given, ranks in ((None, torch.arange(40)), (order, order.argsort())):
        scores, indices = search(queries, documents, k, block, given)
        for row in range(4):
            best = sorted(range(40), key=lambda place: (-similar[row, which[place]], ranks[place]))
            assert indices[row].tolist() == best[:k]
        assert torch.equal(scores, scores.sort(dim=1, descending=True).values)


def test_negative_zero_and_opposite_scores_are_ordered() -> None:
    query = torch.tensor([[1.0, 0.0]])
    documents = torch.tensor([[-1.0, 0.0], [-0.0, 1.0], [-1.0, 5.0], [0.0, 1.0], [-5.0, 1.0], [1.0, 0.0], [-0.0, -1.0]])
    scores, indices = search(query, documents, 7, block=2)
    assert indices.tolist() == [[5, 1, 3, 6, 2, 4, 0]]
    expected = torch.tensor([[1.0, 0, 0, 0, -1 / 26**0.5, -5 / 26**0.5, -1]])
    torch.testing.assert_close(scores, expected, atol=1e-7, rtol=0)
    # What is no number of fp32 any more is 0, on either side.
    nearly = torch.tensor([[-1e-60, 1.0], [1e-60, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert search(query.double(), nearly, 3)[1].tolist() == [[0, 1, 2]]


def test_block_and_number_type_do_not_matter() -> None:
    queries, documents = random_embeddings(5, 30, 500, width=48)
    documents[200:400] = documents[torch.randint(200, (200,), generator=torch.Generator().manual_seed(6))]
    first = search(queries, documents, 60, 500)
    for block in (1, 17, 499):
        scores, indices = search(queries, documents, 60, block)
        assert torch.equal(scores, first[0]) and torch.equal(indices, first[1])
    half = (queries.bfloat16(), documents.bfloat16())
    assert torch.equal(search(*half, 60)[1], search(half[0].float(), half[1].float(), 60)[1])


def test_no_full_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    keys = module._keys
    monkeypatch.setattr(module, "_keys", lambda scores, places: (sizes.append(scores.shape), keys(scores, places))[1])
    search(*random_embeddings(7, 20, 50), 5, block=8)
    assert len(sizes) == 3 * 7 and max(max(size) for size in sizes) == 8


def test_search_s_corners() -> None:
    queries, documents = random_embeddings(8, 3, 4)
    scores, indices = search(queries, documents, 100)
    assert scores.shape == indices.shape == (3, 4)
    assert search(queries[:0], documents, 2)[1].shape == (0, 2)
    with pytest.raises(ValueError, match="no documents"):
        search(queries, documents[:0], 2)
    for broken in (torch.nan, torch.inf):
        spoiled = documents.clone()
        spoiled[3, 2] = broken
        with pytest.raises(ValueError, match="not finite"):
            search(queries, spoiled, 2, block=2)
        with pytest.raises(ValueError, match="not finite"):
            search(spoiled, documents, 2)


def mteb_scores(
    queries: dict[str, Tensor], documents: dict[str, Tensor], qrels: dict[str, dict[str, int]]
) -> dict[str, float]:
    """By mteb and pytrec_eval, from every document's score."""
    matrix = torch.stack(list(documents.values())).double()
    runs = {
        query: dict(zip(documents, F.cosine_similarity(embedding.double(), matrix).float().tolist(), strict=True))
        for query, embedding in queries.items()
    }
    found = calculate_retrieval_scores(runs, qrels, [10, 100])
    assert found.all_scores.keys() == queries.keys()
    return {
        "ndcg_at_10": sum(values["ndcg_cut_10"] for values in found.all_scores.values()) / len(queries),
        "mrr_at_10": found.mrr["MRR@10"],
        "recall_at_100": sum(values["recall_100"] for values in found.all_scores.values()) / len(queries),
    }


@pytest.mark.parametrize(("seed", "count", "kinds"), [(0, 300, 300), (1, 300, 20), (2, 300, 2), (3, 30, 30), (4, 5, 3)])
def test_scores_are_mteb_s(seed: int, count: int, kinds: int) -> None:
    """With as many different documents as there are, and with many that tie, also across the first 10 and 100."""
    generator = torch.Generator().manual_seed(seed)
    sought, different = random_embeddings(seed, 25, kinds)
    # Ids whose order as texts isn't that of numbers, nor that of the corpus, and not ASCII alone.
    names = [f"{'dDé€😀'[int(place) % 5]}{int(place)}" for place in torch.randperm(count, generator=generator)]
    content = different[torch.randint(kinds, (count,), generator=generator)]
    qrels = {}
    for number in range(25):
        judged = torch.randperm(count, generator=generator)[: int(torch.randint(1, 30, (1,), generator=generator))]
        qrels[f"q{number}"] = {
            names[int(place)]: int(torch.randint(0, 4, (1,), generator=generator)) for place in judged
        }
    qrels["q0"] = dict.fromkeys(qrels["q0"], 0)  # nothing relevant
    qrels["q1"] = {"not in the corpus": 1, names[0]: 2}
    qrels["asked by nobody"] = {names[0]: 1}
    ids = [f"q{number}" for number in range(25)]
    expected = mteb_scores(dict(zip(ids, sought, strict=True)), dict(zip(names, content, strict=True)), qrels)
    found = retrieval_scores(ids, sought, names, content, qrels)
    # mteb rounds its means to five places, the queries' own scores not at all.
    assert found == pytest.approx(expected, abs=1e-5)
    assert found["ndcg_at_10"] == pytest.approx(expected["ndcg_at_10"], abs=1e-9)
    assert 0 < found["ndcg_at_10"] < 1


def test_bad_retrieval_input() -> None:
    queries, documents = random_embeddings(9, 2, 3)
    qrels = {"a": {"x": 1}, "b": {"y": 1}}
    retrieval_scores(["a", "b"], queries, ["x", "y", "z"], documents, qrels)
    for query_ids, document_ids, said in (
        (["a"], ["x", "y", "z"], "1 ids of queries, but 2"),
        (["a", "b"], ["x", "y"], "2 ids of documents, but 3"),
        (["a", "a"], ["x", "y", "z"], "id of the queries comes twice"),
        (["a", "b"], ["x", "y", "x"], "id of the documents comes twice"),
        (["a", "c"], ["x", "y", "z"], r"1 queries are not judged, e\.g\. c"),
    ):
        with pytest.raises(ValueError, match=said):
            retrieval_scores(query_ids, queries, document_ids, documents, qrels)
    with pytest.raises(ValueError, match="no queries"):
        retrieval_scores([], queries[:0], ["x", "y", "z"], documents, qrels)
    with pytest.raises(ValueError, match="no documents"):
        retrieval_scores(["a", "b"], queries, [], documents[:0], qrels)
