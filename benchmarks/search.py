"""Memory and time of exact search as the corpus grows: synthetic vectors in the embedding cache, read a block at a time."""

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

from tables import save
from workload import ROOT, asked, command, say

SIZES = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Shape:
    """The search."""

    queries: int = 100
    width: int = 768
    k: int = 1000
    threads: int = 2

    def describe(self) -> str:
        """A line for the page."""
        return (
            f"{self.queries} queries, width {self.width}, the nearest {self.k:,}, {self.threads} threads. Peak memory is of "
            "the whole process, torch with it; seconds are the search's alone, reading from disk included."
        )


def write(folder: Path, documents: int, shape: Shape) -> None:
    """Vectors of a corpus, in the cache's files."""
    import numpy as np

    from biphasic.evaluation.embedding_cache import EmbeddingCache
    from biphasic.evaluation.retriever import BLOCK

    with EmbeddingCache(folder, 1 << 50).blocks({"documents": documents}, 4 * documents * shape.width) as blocks:
        for number, first in enumerate(range(0, documents, BLOCK)):
            generator = np.random.default_rng([documents, number])
            blocks.put(number, generator.standard_normal((min(BLOCK, documents - first), shape.width), np.float32))


def search(folder: Path, documents: int, shape: Shape) -> dict[str, float]:
    """In a process of its own: seconds and the process's peak memory in bytes."""
    import numpy as np
    import torch

    from biphasic.evaluation.embedding_cache import EmbeddingCache
    from biphasic.evaluation.retriever import BLOCK
    from biphasic.evaluation.search import Nearest

    torch.set_num_threads(shape.threads)
    queries = torch.from_numpy(np.random.default_rng(7).standard_normal((shape.queries, shape.width), np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.monotonic()
    nearest = Nearest(queries, shape.k)
    with EmbeddingCache(folder, 1 << 50).blocks({"documents": documents}, 4 * documents * shape.width) as blocks:
        for number, first in enumerate(range(0, documents, BLOCK)):
            found = blocks.get(number)
            assert found is not None
            nearest.add(torch.from_numpy(np.array(found)), first)
    places = nearest.result()[1]
    seconds = time.monotonic() - start
    assert places.shape == (shape.queries, min(shape.k, documents))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "before": before}


def measure(shape: Shape, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """All sizes."""
    found: dict[str, Any] = {"shape": asdict(shape), "sizes": {}}
    for documents in sizes:
        with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as folder:
            say(f"{documents:,} documents")
            write(Path(folder), documents, shape)
            script = [sys.executable, __file__, "--search", folder, str(documents), json.dumps(asdict(shape))]
            out = subprocess.run(script, capture_output=True, text=True, check=True).stdout
            found["sizes"][documents] = json.loads(out.splitlines()[-1])
    return found


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for documents, one in found["sizes"].items():
        vectors = 4 * int(documents) * found["shape"]["width"]
        rows.append(
            [f"{int(documents):,}", f"{vectors / 1e9:.2f} GB", f"{one['peak'] / 1e9:.2f} GB",
             f"{(one['peak'] - one['before']) / 1e9:.2f} GB", f"{one['seconds']:.1f}"]
        )  # fmt: skip
    return ["documents", "their vectors", "peak memory", "of it the search's", "seconds"], rows


def main() -> None:
    """Measure, and write the table; or, for `measure`, search once."""
    if sys.argv[1:2] == ["--search"]:
        folder, documents, shape = sys.argv[2:]
        print(json.dumps(search(Path(folder), int(documents), Shape(**json.loads(shape)))))
        return
    shape = asked(Shape, __doc__)
    found = measure(shape)
    header, rows = table(found)
    print(save("search", "Exact search as the corpus grows", command("bench-search"), header, rows, found,
               note=shape.describe()))  # fmt: skip


if __name__ == "__main__":
    main()
