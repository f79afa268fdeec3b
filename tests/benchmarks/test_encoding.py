"""The benchmarks of embedding and search: both libraries give the same results, and the numbers are consistent."""

import importlib
import json
import statistics
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
    results = benchmark.measure(shape, (model,))
    one = results["models"][model]
    assert {side: len(seconds) for side, seconds in one["seconds"].items()} == dict.fromkeys(benchmark.SIDES, 1)
    assert one["apart"] < 1e-5
    header, rows = benchmark.table(results)
    assert [len(row) for row in rows] == [len(header)] * 2
    biphasic, other = (one["seconds"][side][0] for side in benchmark.SIDES)
    assert rows[1][2] == f"{other / biphasic:.2f}"


def test_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process instead of one of its own."""
    benchmark = module("search")

    def run(kind: str, *arguments: str) -> str:
        if kind == "--in-memory":
            side, shape = arguments
            return str(benchmark.search_in_memory(side, benchmark.Compared(**json.loads(shape))))
        folder, documents, shape = arguments
        return json.dumps(benchmark.search(Path(folder), int(documents), benchmark.Shape(**json.loads(shape))))

    monkeypatch.setattr(benchmark, "in_process", run)
    compared = benchmark.Compared(queries=4, documents=300, width=8, k=5, threads=1, rounds=2)
    results = benchmark.measure(benchmark.Shape(queries=3, width=8, k=100, threads=1), (5000,), compared)
    ours, faiss = results["Biphasic"], results["faiss"]
    ratio = statistics.median(peer / own for own, peer in zip(ours, faiss, strict=True))
    assert len(ours) == 2 and f": {ratio:.2f}, the median of 2 rounds" in benchmark.beside_faiss(results)
    one = results["sizes"][5000]
    assert 0 < one["before"] <= one["peak"] and one["seconds"] > 0
    header, rows = benchmark.table(results)
    assert len(rows[0]) == len(header)
