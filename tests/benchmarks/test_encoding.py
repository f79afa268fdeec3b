"""The benchmarks of embedding and search: both libraries give the same results, and the numbers are consistent."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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

    def run(script: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder, documents, shape = script[3:]
        result = benchmark.search(Path(folder), int(documents), benchmark.Shape(**json.loads(shape)))
        return subprocess.CompletedProcess(script, 0, stdout=json.dumps(result))

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    results = benchmark.measure(benchmark.Shape(queries=3, width=8, k=100, threads=1), (5000,))
    one = results["sizes"][5000]
    assert 0 < one["before"] <= one["peak"] and one["seconds"] > 0
    header, rows = benchmark.table(results)
    assert len(rows[0]) == len(header)
