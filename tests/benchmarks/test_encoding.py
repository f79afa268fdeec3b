"""The benchmarks of embedding and search: both sides embed alike, and the numbers have the right form."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"texts": 40, "rounds": 1, "width": 32, "layers": 2, "words": 200, "longest": 64, "threads": 1}


def module(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_embedding(model: str) -> None:
    benchmark = module("encoding")
    shape = benchmark.Shape(**TINY)
    found = benchmark.measure(shape, (model,))
    one = found["models"][model]
    assert {side: len(seconds) for side, seconds in one["seconds"].items()} == dict.fromkeys(benchmark.SIDES, 1)
    assert one["apart"] < 1e-5
    header, rows = benchmark.table(found)
    assert [len(row) for row in rows] == [len(header)] * 2
    ours, theirs = (one["seconds"][side][0] for side in benchmark.SIDES)
    assert rows[1][2] == f"{theirs / ours:.2f}"


@pytest.mark.parametrize("documents", [50, 5000])
def test_search(documents: int) -> None:
    benchmark = module("search")
    found = benchmark.measure(benchmark.Shape(queries=3, width=8, k=100, threads=1), (documents,))
    one = found["sizes"][documents]
    assert 0 < one["before"] <= one["peak"] and one["seconds"] > 0
    header, rows = benchmark.table(found)
    assert len(rows[0]) == len(header)
