"""The ranking that fp32 candidates lead to is the one of all fp64 sums, bit for bit: ties, sums that cancel or vanish."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from biphasic.evaluation import search as module
from biphasic.evaluation.search import ExactTopK


def all_sums(
    queries: Tensor, documents: Tensor, k: int, similarity: str, mask: Tensor | None
) -> tuple[Tensor, list[list[int]]]:
    """Return the fp32 score of every document, and each query's best k: of equal scores the lower position first."""
    queries, documents = queries.double(), documents.double()
    if similarity == "cosine":
        queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
    matrix, best = (queries @ documents.T).float(), []
    for row, scores in enumerate(matrix.tolist()):
        positions = [at for at in range(len(scores)) if mask is None or mask[row, at]]
        best.append(sorted(positions, key=lambda at: (-scores[at], at))[:k])
    return matrix, best


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the sums of pairs, and the products that sum whole blocks."""
    counts, sums, keys = {"pairs": 0, "blocks": 0}, module._pair_sums, module._keys

    def pair_sums(queries: Tensor, block: Tensor, begins: Tensor, column: Tensor) -> Tensor:
        counts["pairs"] += len(column)
        return sums(queries, block, begins, column)

    def keys_of(scores: Tensor, positions: Tensor) -> Tensor:
        counts["blocks"] += scores.ndim > 1
        return keys(scores, positions)

    with mock.patch.object(module, "_pair_sums", pair_sums), mock.patch.object(module, "_keys", keys_of):
        yield counts


def assert_same(
    queries: Tensor, documents: Tensor, k: int, similarity: str, block: int = 64, added: int = 0, seed: int = 0,
    mask: Tensor | None = None,
) -> dict[str, int]:  # fmt: skip
    """Add the documents `added` at a time, shuffled; compare scores bit for bit, and positions, with those of all sums.

    Candidates are chosen by fp32 alone, and by bf16 too, of which the counts are returned.
    """
    matrix, expected = all_sums(queries, documents, k, similarity, mask)
    size, counts = added or len(documents), dict[str, int]()
    starts = torch.arange(0, len(documents), size)
    order = starts[torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))].tolist()
    for rounds in (False, True):
        with mock.patch.object(module, "_multiplies_bf16_faster", return_value=rounds):
            nearest = ExactTopK(queries, k, similarity, block)
        with counted() as number, mock.patch.object(module, "_QUERIES", 7):
            for first in order:
                part = slice(first, first + size)
                nearest.add(documents[part], first, None if mask is None else mask[:, part])
        counts, (scores, positions) = number, nearest.result()
        assert [[at for at in row if at >= 0] for row in positions.tolist()] == expected
        for row, best in enumerate(expected):
            # -0 counts as 0
            assert torch.equal((matrix[row, best] + 0.0).view(torch.int32), scores[row, : len(best)].view(torch.int32))
    return counts


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_few_pairs_are_summed(similarity: str, dtype: torch.dtype) -> None:
    queries, documents = gaussian(0, 70, 48).to(dtype), gaussian(1, 12_003, 48).to(dtype)
    counts = assert_same(queries, documents, 10, similarity, block=512)
    # A tenth of ten in the second block's eights, and so on: the first block alone is summed in full.
    assert counts["blocks"] <= 2 and 10 * 70 < counts["pairs"] < 70 * 60


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-25, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_lengths_that_fp32_can_hardly_hold(scale: float, similarity: str) -> None:
    """Dot products vanish or overflow in fp32 here, so that many tie."""
    queries, documents = gaussian(2, 20, 16) * scale, gaussian(3, 2000, 16) * scale
    documents[::7] *= 1e-6
    documents[5::31] = 0
    queries[3], queries[4] = 0, queries[4] * 1e-5
    assert_same(queries, documents, 9, similarity, added=300, block=128)
    large = documents.double() * 1e200
    assert_same(queries.double() * 1e-200, large, 9, "dot", added=300, block=128)


def test_duplicates_across_blocks_rank_by_position() -> None:
    queries, kinds = gaussian(4, 12, 32), gaussian(5, 40, 32)
    documents = kinds[torch.randint(40, (3000,), generator=torch.Generator().manual_seed(6))]
    for k in (1, 30, 100, 2900, 4000):
        assert_same(queries, documents, k, "cosine", added=500, block=256)
    counts = assert_same(queries, kinds[:1].expand(3000, -1), 5, "cosine", block=256)
    assert counts["pairs"] == 0  # each query ties with all documents


def test_scores_one_step_apart() -> None:
    """Neighbours in fp32 differ by less than the bound; one of them or the other is in the best k."""
    base = gaussian(7, 1, 24)
    steps = torch.randint(-3, 4, (4000, 24), generator=torch.Generator().manual_seed(8))
    documents = base * (1 + steps * 2.0**-24)
    queries = torch.cat([base, gaussian(9, 5, 24)])
    for similarity in ("cosine", "dot"):
        assert_same(queries, documents, 20, similarity, block=512, added=1000)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("seed", range(4))
def test_masks(similarity: str, seed: int) -> None:
    queries, documents = gaussian(seed, 30, 20), gaussian(seed + 50, 5000, 20)
    documents[1000:1400] = documents[:400]
    mask = torch.rand(30, 5000, generator=torch.Generator().manual_seed(seed)) < torch.linspace(0, 1, 30)[:, None] ** 3
    counts = assert_same(queries, documents, 15, similarity, block=512, added=1500, seed=seed, mask=mask)
    assert 0 < counts["pairs"] < 30 * 5000 / 8


def test_settings_that_make_products_coarse() -> None:
    """bf16 products, which `medium` and autocast allow, would lose some of the best."""
    queries, documents = gaussian(10, 40, 384), gaussian(11, 6000, 384)
    queries, documents = queries + 3, documents + 3  # similar scores
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(queries, documents, 10, "cosine", block=1024)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_error_of_fp32_is_below_the_bound() -> None:
    for width in (1, 12, 384, 4096):
        left, right = gaussian(width, 50, width).abs(), gaussian(width + 1, 60, width).abs()  # the worst: no cancelling
        left, right = F.normalize(left.double(), dim=1), F.normalize(right.double(), dim=1)
        difference = module._fp32_product(left.float(), right.float()).double() - left @ right.T
        assert float(difference.abs().max()) < module._fp32_error(width)


@pytest.mark.parametrize("width", [1, 12, 384, 4096])
def test_products_of_bf16_reach_what_fp64_reaches(width: int) -> None:
    """A pair is chosen if its product in fp64 is the limit, which is at most the product plus the error's bound."""
    left, right = gaussian(width, 50, width).abs(), gaussian(width + 1, 60, width).abs()
    left, right = F.normalize(left.double(), dim=1), F.normalize(right.double(), dim=1)
    (a, a_error), (b, b_error) = module._round_to_bf16(left.float()), module._round_to_bf16(right.float())
    exact, error = left @ right.T, 1.01 * (a_error + b_error.T) + 4 * module._fp32_error(width)
    assert bool((module._bf16_product(a, b) >= (exact - error).float().bfloat16()).all())
    assert float(error.max()) < 2.0**-7


def test_rounding_stops_where_it_chooses_too_many() -> None:
    """Embeddings of one direction, as of an untrained encoder, lie nearer to each other than bf16 tells apart."""
    spread, alike = gaussian(12, 6000, 96), gaussian(13, 6000, 96) * 0.01 + 1
    for documents, rounds in ((spread, True), (alike, False)):
        with mock.patch.object(module, "_multiplies_bf16_faster", return_value=True):
            nearest = ExactTopK(documents[:50] + 0.001, 10, "cosine", block=1000)
        with mock.patch.object(module, "_bf16_product", side_effect=module._bf16_product) as product:
            nearest.add(documents, 0)
        assert nearest._rounds is rounds and product.call_count == (5 if rounds else 1)


VALUES = [0, 1, -1, 1 + 2**-10, -1 - 2**-10, 3, 2**10, -(2**10), 2**-12]
"""Products of these are exact in fp64 and so are their sums, in any order, also those that cancel."""


@st.composite
def adversarial(draw: st.DrawFn) -> dict[str, object]:
    """Vectors of few values, repeated, and scaled by powers of two from which fp32 underflows and overflows."""
    width, seed = draw(st.integers(1, 20)), draw(st.integers(0, 2**20))
    count, kinds, asked = draw(st.integers(1, 400)), draw(st.integers(1, 60)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=5)), dtype=torch.float32)
    rows = values[torch.randint(len(values), (kinds + asked, width), generator=generator)]
    exponents = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 1, -3, 60, -60, 110, -110]), min_size=1, max_size=4)))
    rows = rows * 2.0 ** exponents[torch.randint(len(exponents), (len(rows), 1), generator=generator)]
    documents = rows[:kinds][torch.randint(kinds, (count,), generator=generator)]
    mask = torch.rand(asked, count, generator=generator) < draw(st.sampled_from([0.02, 0.5, 0.98]))
    return {
        "queries": rows[kinds:], "documents": documents, "seed": seed, "k": draw(st.integers(1, 30)),
        "block": draw(st.sampled_from([8, 9, 64, 300])), "added": draw(st.sampled_from([0, 1, 37, 128])),
        "mask": draw(st.sampled_from([None, mask])),
    }  # fmt: skip


@given(adversarial())
@settings(max_examples=300, deadline=None)
def test_adversarial_dot_products(case: dict[str, object]) -> None:
    assert_same(similarity="dot", **case)  # pyright: ignore[reportArgumentType]
