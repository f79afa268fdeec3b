"""Memory and time of exact search by the size of the corpus: synthetic vectors in files, read by blocks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workload import ROOT, parse_options, report, say

SIZES = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Shape:
    """The size of the search."""

    queries: int = 100
    width: int = 768
    k: int = 1000
    threads: int = 2

    def describe(self) -> str:
        return (
            f"{self.queries} queries, width {self.width}, the nearest {self.k:,}, {self.threads} threads. Peak memory is of "
            "the complete process with torch; seconds are of the search, including reads from disk."
        )


def write(folder: Path, documents: int, shape: Shape) -> None:
    import numpy as np

    from biphasic.evaluation.blocks import BLOCK

    for number, first in enumerate(range(0, documents, BLOCK)):
        generator = np.random.default_rng([documents, number])
        vectors = generator.standard_normal((min(BLOCK, documents - first), shape.width), np.float32)
        np.save(folder / f"{number}.npy", vectors)


def search(folder: Path, documents: int, shape: Shape) -> dict[str, float]:
    """Search in this process: seconds, and the process's peak memory in bytes before and after."""
    import numpy as np
    import torch

    from biphasic.evaluation.blocks import BLOCK
    from biphasic.evaluation.search import ExactTopK

    torch.set_num_threads(shape.threads)
    queries = torch.from_numpy(np.random.default_rng(7).standard_normal((shape.queries, shape.width), np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.monotonic()
    nearest = ExactTopK(queries, shape.k)
    for number, first in enumerate(range(0, documents, BLOCK)):
        nearest.add(torch.from_numpy(np.array(np.load(folder / f"{number}.npy", mmap_mode="r"))), first)
    positions = nearest.result()[1]
    seconds = time.monotonic() - start
    assert positions.shape == (shape.queries, min(shape.k, documents))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "before": before}


def measure(shape: Shape, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    results: dict[str, Any] = {"shape": asdict(shape), "sizes": {}}
    for documents in sizes:
        with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as folder:
            say(f"{documents:,} documents")
            write(Path(folder), documents, shape)
            script = [sys.executable, __file__, "--search", folder, str(documents), json.dumps(asdict(shape))]
            out = subprocess.run(script, capture_output=True, text=True, check=True).stdout
            results["sizes"][documents] = json.loads(out.splitlines()[-1])
    return results


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for documents, of_size in results["sizes"].items():
        vectors = 4 * int(documents) * results["shape"]["width"]
        rows.append(
            [f"{int(documents):,}", f"{vectors / 1e9:.2f} GB", f"{of_size['peak'] / 1e9:.2f} GB",
             f"{(of_size['peak'] - of_size['before']) / 1e9:.2f} GB", f"{of_size['seconds']:.1f}"]
        )  # fmt: skip
    return ["documents", "their vectors", "peak memory", "of which the search", "seconds"], rows


def main() -> None:
    if sys.argv[1:2] == ["--search"]:
        folder, documents, shape = sys.argv[2:]
        print(json.dumps(search(Path(folder), int(documents), Shape(**json.loads(shape)))))
        return
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    report("search", "Exact search as the corpus grows", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
