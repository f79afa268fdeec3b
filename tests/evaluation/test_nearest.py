"""Search over documents that come a block at a time, in any order, in several processes, in memory that doesn't grow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from biphasic.evaluation.search import Nearest

WIDTH = 12


def random_embeddings(seed: int, queries: int, documents: int, kinds: int | None = None) -> tuple[Tensor, Tensor]:
    """Of different lengths; with `kinds`, so many different documents, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    sought = torch.randn(queries, WIDTH, generator=generator)
    different = torch.randn(kinds or documents, WIDTH, generator=generator)
    which = torch.arange(documents) if kinds is None else torch.randint(kinds, (documents,), generator=generator)
    lengths = 2.0 ** torch.randint(-2, 3, (documents, 1), generator=generator)  # exact
    return sought, different[which] * (lengths if kinds is None else 1)


def full_sort(
    queries: Tensor, documents: Tensor, k: int, similarity: str, wanted: Tensor | None = None
) -> list[list[int]]:
    """The best k places, from the whole matrix; of equal scores the lower place first."""
    if similarity == "cosine":
        queries, documents = (F.normalize(x.double(), dim=1) for x in (queries, documents))
    matrix = (queries.double() @ documents.double().T).float().tolist()
    found = []
    for row, scores in enumerate(matrix):
        places = [at for at in range(len(scores)) if wanted is None or wanted[row, at]]
        found.append(sorted(places, key=lambda at: (-scores[at], at))[:k])
    return found


def there(places: Tensor) -> list[list[int]]:
    """Without the -1s, which come last."""
    found = [[place for place in row if place >= 0] for row in places.tolist()]
    assert all(
        row[len(kept) :] == [-1] * (len(row) - len(kept)) for row, kept in zip(places.tolist(), found, strict=True)
    )
    return found


def shuffled(count: int, block: int, seed: int) -> list[tuple[int, int]]:
    """Blocks from and to, in any order."""
    starts = [first for first in range(0, count, block)]
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(starts[at], min(starts[at] + block, count)) for at in order]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("kinds", [None, 7])
@pytest.mark.parametrize(
    ("k", "block", "inner"), [(1, 1, 1), (10, 33, 8), (10, 200, 64), (100, 17, 2048), (500, 50, 7)]
)
def test_blocks_in_any_order(similarity: str, kinds: int | None, k: int, block: int, inner: int) -> None:
    queries, documents = random_embeddings(0, 9, 200, kinds)
    expected = full_sort(queries, documents, k, similarity)
    found = []
    for seed in range(3):
        nearest = Nearest(queries, k, similarity, block=inner)
        for first, end in shuffled(200, block, seed):
            nearest.add(documents[first:end], first)
        scores, places = nearest.result()
        assert (scores.dtype, places.dtype) == (torch.float32, torch.int64)
        assert scores.shape == places.shape == (9, min(k, 200))
        assert places.tolist() == expected
        found.append(scores)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_dot_is_of_lengths_and_cosine_is_not() -> None:
    query = torch.tensor([[2.0, 0.0]])
    documents = torch.tensor([[1.0, 0.0], [3.0, 3.0], [-5.0, 1.0], [0.0, 0.0]])
    for similarity, places, scores in (("dot", [1, 0, 3, 2], [6.0, 2.0, 0.0, -10.0]),
                                       ("cosine", [0, 1, 3, 2], [1.0, 0.5**0.5, 0.0, -5 / 26**0.5])):  # fmt: skip
        nearest = Nearest(query, 4, similarity)
        nearest.add(documents, 0)
        found = nearest.result()
        assert found[1].tolist() == [places]
        torch.testing.assert_close(found[0], torch.tensor([scores]))


@pytest.mark.parametrize("block", [3, 50, 2048])
@pytest.mark.parametrize("k", [1, 6, 40])
def test_only_what_is_wanted(k: int, block: int) -> None:
    """Each query among documents of its own, a query without any among them."""
    queries, documents = random_embeddings(1, 7, 60, kinds=20)
    generator = torch.Generator().manual_seed(2)
    wanted = torch.rand(7, 60, generator=generator) < torch.tensor([0, 0.05, 0.2, 0.5, 0.9, 1, 0.1])[:, None]
    expected = full_sort(queries, documents, k, "cosine", wanted)
    assert expected[0] == [] and len(expected[5]) == k
    nearest = Nearest(queries, k, block=block)
    for first, end in shuffled(60, 11, 0):
        nearest.add(documents[first:end], first, wanted[:, first:end])
    assert there(nearest.result()[1]) == expected


Others = Callable[[Tensor], list[Tensor]]


def gathered(ranks: list[Nearest]) -> Others:
    """What every rank holds, brought to k columns as ranks themselves do before they send."""
    held: list[Tensor] = []
    for one in ranks:
        one.merge(lambda mine: (held.append(mine.clone()), [mine])[1])
    assert len({part.shape for part in held}) == 1
    return lambda mine: held


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("count", "world", "block"), [(90, 2, 16), (90, 4, 7), (90, 3, 90), (5, 4, 1), (3, 4, 2), (1, 3, 4)]
)
@pytest.mark.parametrize("k", [1, 10, 100])
def test_ranks_find_what_one_process_finds(count: int, world: int, block: int, k: int, similarity: str) -> None:
    """Blocks go around, so that the last ranks have fewer documents than k, or none."""
    queries, documents = random_embeddings(3, 6, count, kinds=max(count // 3, 1))
    blocks = [(first, min(first + block, count)) for first in range(0, count, block)]
    alone = Nearest(queries, k, similarity)
    ranks = [Nearest(queries, k, similarity) for _ in range(world)]
    for number, (first, end) in enumerate(blocks):
        alone.add(documents[first:end], first)
        ranks[number % world].add(documents[first:end], first)
    assert count >= 90 or any(rank._best.shape[1] < k for rank in ranks) or k == 1
    others = gathered(ranks)
    scores, places = alone.result()
    for rank in ranks:
        rank.merge(others)
        found_scores, found = rank.result()
        assert found.shape == (6, k)
        assert there(found) == places.tolist() == full_sort(queries, documents, k, similarity)
        assert torch.equal(found_scores[:, : scores.shape[1]], scores)


def test_no_rank_has_what_is_wanted() -> None:
    queries, documents = random_embeddings(4, 2, 4)
    ranks = [Nearest(queries, 3) for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.add(
            documents[2 * number : 2 * number + 2], 2 * number, torch.tensor([[False, False], [True, number == 0]])
        )
    others = gathered(ranks)
    ranks[1].merge(others)
    found = ranks[1].result()[1]
    assert found[0].tolist() == [-1, -1, -1]
    assert sorted(found[1].tolist()) == [0, 1, 2]


def test_no_queries_and_no_documents() -> None:
    queries, documents = random_embeddings(5, 3, 4)
    nearest = Nearest(queries, 5)
    assert [part.shape for part in nearest.result()] == [(3, 0), (3, 0)]
    nearest.add(documents[:0], 0)
    nearest.add(documents, 0)
    assert nearest.result()[1].shape == (3, 4)
    none = Nearest(queries[:0], 5)
    none.add(documents, 0)
    assert len(none.result()[1]) == 0


MEMORY = """
import re, sys, torch
from biphasic.evaluation.search import Nearest
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
def peak(count):
    nearest = Nearest(torch.randn(100, 128, generator=generator), 100)
    for first in range(0, count, 4096):
        nearest.add(torch.randn(min(4096, count - first), 128, generator=generator), first)
    assert nearest.result()[1].shape == (100, 100)
    # Of this program alone; getrusage's counts what the process was before it began.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
print(peak(10_000), peak(200_000))
"""


def test_memory_does_not_grow_with_the_corpus() -> None:
    """200,000 documents take 98 MB, their similarities 153 MB in fp64; 20 MB are for what malloc doesn't give back."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    small, large = map(float, run.stdout.split())
    assert large - small < 20, run.stdout
