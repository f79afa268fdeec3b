"""Memory and time of exact search by the size of the corpus, and its speed beside faiss's: synthetic vectors.

The corpora are in files that are read by blocks; the time to read them alone is measured after each search. Both sides of
the comparison find the largest inner products of vectors in memory, in processes of their own, in turn: Biphasic with sums
in fp64, `faiss.IndexFlatIP` in fp32.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from workload import ROOT, parse_options, report, say, take_turns

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
            "the complete process with torch; seconds are of the search with reads from files, and of these reads alone."
        )


@dataclass(frozen=True)
class Compared:
    """The size of the search in memory."""

    queries: int = 2_000
    documents: int = 100_000
    width: int = 384
    k: int = 100
    threads: int = 2
    rounds: int = 5


def write(folder: Path, documents: int, shape: Shape) -> None:
    import numpy as np

    from biphasic.evaluation.retriever import BLOCK

    for number, first in enumerate(range(0, documents, BLOCK)):
        generator = np.random.default_rng([documents, number])
        vectors = generator.standard_normal((min(BLOCK, documents - first), shape.width), np.float32)
        np.save(folder / f"{number}.npy", vectors)


def search(folder: Path, documents: int, shape: Shape) -> dict[str, float]:
    """Search in this process: seconds, and the process's peak memory in bytes before and after."""
    import numpy as np
    import torch

    from biphasic.evaluation.retriever import BLOCK
    from biphasic.evaluation.search import ExactTopK

    torch.set_num_threads(shape.threads)
    queries = torch.from_numpy(np.random.default_rng(7).standard_normal((shape.queries, shape.width), np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.monotonic()
    nearest, firsts = ExactTopK(queries, shape.k), range(0, documents, BLOCK)
    for number, first in enumerate(firsts):
        nearest.add(torch.from_numpy(np.load(folder / f"{number}.npy")), first)
    positions = nearest.result()[1]
    seconds = time.monotonic() - start
    assert positions.shape == (shape.queries, min(shape.k, documents))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.monotonic()
    for number, _ in enumerate(firsts):
        np.load(folder / f"{number}.npy")
    return {"seconds": seconds, "read_seconds": time.monotonic() - start, "peak": peak, "before": before}


def search_in_memory(side: str, shape: Compared) -> float:
    """Search in this process with one side of the comparison, and return the seconds of the second time."""
    import numpy as np

    generator = np.random.default_rng(7)
    queries, documents = (
        generator.standard_normal((rows, shape.width), np.float32) for rows in (shape.queries, shape.documents)
    )

    if side == "faiss":
        import faiss

        faiss.omp_set_num_threads(shape.threads)

        def find() -> Any:
            index = faiss.IndexFlatIP(shape.width)
            index.add(documents)  # pyright: ignore
            return index.search(queries, shape.k)[1]  # pyright: ignore
    else:
        import torch

        from biphasic.evaluation.search import ExactTopK

        torch.set_num_threads(shape.threads)

        def find() -> Any:
            nearest = ExactTopK(torch.from_numpy(queries), shape.k, "dot")
            nearest.add(torch.from_numpy(documents), 0)
            return nearest.result()[1]

    find()
    start = time.monotonic()
    assert find().shape == (shape.queries, shape.k)
    return time.monotonic() - start


def in_process(*arguments: str) -> str:
    """Return the last line that this script prints in another process."""
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1]


def measure(shape: Shape, sizes: tuple[int, ...] = SIZES, compared: Compared = Compared()) -> dict[str, Any]:
    def in_memory(side: str) -> Callable[[int], float]:
        def seconds(round_: int) -> float:
            say(f"in memory with {side}, round {round_}")
            return float(in_process("--in-memory", side, json.dumps(asdict(compared))))

        return seconds

    results: dict[str, Any] = {"shape": asdict(shape), "compared": asdict(compared), "sizes": {}}
    results |= take_turns(compared.rounds, {side: in_memory(side) for side in ("Biphasic", "faiss")})
    for documents in sizes:
        with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as folder:
            say(f"{documents:,} documents")
            write(Path(folder), documents, shape)
            out = in_process("--search", folder, str(documents), json.dumps(asdict(shape)))
            results["sizes"][documents] = json.loads(out)
    return results


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for documents, of_size in results["sizes"].items():
        vectors = 4 * int(documents) * results["shape"]["width"]
        rows.append(
            [f"{int(documents):,}", f"{vectors / 1e9:.2f} GB", f"{of_size['peak'] / 1e9:.2f} GB",
             f"{(of_size['peak'] - of_size['before']) / 1e9:.2f} GB", f"{of_size['seconds']:.1f}",
             f"{of_size['read_seconds']:.1f}"]
        )  # fmt: skip
    return ["documents", "their vectors", "peak memory", "of which the search", "seconds", "of which reading"], rows


def beside_faiss(results: dict[str, Any]) -> str:
    """Describe the comparison."""
    shape, ours, faiss = Compared(**results["compared"]), results["Biphasic"], results["faiss"]
    rates = [f"{shape.queries / median(seconds):,.0f} queries a second" for seconds in (ours, faiss)]
    ratio = median(peer / own for own, peer in zip(ours, faiss, strict=True))
    size = f"{shape.queries:,} queries, {shape.documents:,} documents, width {shape.width}, k {shape.k}"
    name = f"faiss.IndexFlatIP {version('faiss-cpu')}"
    return f"In memory, {size}: {rates[0]}, and {rates[1]} with {name}: {ratio:.2f}, the median of {shape.rounds} rounds."


def main() -> None:
    if sys.argv[1:2] == ["--search"]:
        folder, documents, shape = sys.argv[2:]
        print(json.dumps(search(Path(folder), int(documents), Shape(**json.loads(shape)))))
        return
    if sys.argv[1:2] == ["--in-memory"]:
        print(search_in_memory(sys.argv[2], Compared(**json.loads(sys.argv[3]))))
        return
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    note = f"{shape.describe()}\n\n{beside_faiss(results)}"
    report("search", "Exact search as the corpus grows", *table(results), results, note=note)


if __name__ == "__main__":
    main()
