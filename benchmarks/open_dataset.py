"""The time to open a dataset and read its first batch, at the start of an epoch and at 90% of it.

    python benchmarks/open_dataset.py [--rows 50000] [--repeats 5]

A resumed run must find its position without reading the rows before it: the two times should be within 20% of each
other. Each is measured in a new process, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tables import save

LENGTH, BATCH, SHARE = 512, 16, 0.9


def write_rows(folder: Path, rows: int, length: int = LENGTH, size_limit: int = 1 << 22) -> None:
    """Write rows of `length` random tokens, in the columns of a conversion, in shards of up to `size_limit` bytes."""
    import numpy as np
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{length}", "lengths": "ndarray:uint32"}
    generator = np.random.default_rng(0)
    with MDSWriter(
        out=str(folder), columns=columns, hashes=["xxh64"], compression="zstd", size_limit=size_limit
    ) as out:
        for _ in range(rows):
            tokens = generator.integers(0, 1 << 16, length, dtype=np.uint16)
            out.write({"tokens": tokens, "lengths": np.array([length], np.uint32)})


def open_once(folder: Path, share: float) -> float:
    """Seconds from opening the dataset to its first batch, in this process."""
    from biphasic.config.data import DataConfig
    from biphasic.data.streaming import build_loader

    content = {"sequence_length": LENGTH, "train": {"local": str(folder)}, "num_workers": 0}
    config = DataConfig.model_validate(content)
    start = time.perf_counter()
    batches: Any = build_loader(config.reading, config.streams, BATCH, seed=1, train=True)
    if share:
        dataset = batches.dataset
        dataset.start_at(0, int(len(dataset) * share) // BATCH * BATCH)
    next(iter(batches))
    return time.perf_counter() - start


def measure(rows: int = 50_000, repeats: int = 5) -> dict[str, Any]:
    """Seconds at the start and at 90% of an epoch: all repeats, their medians, and the ratio of the medians."""
    by_start: dict[str, list[float]] = {"start": [], "resumed": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "train"
        write_rows(folder, rows)
        for repeat in range(repeats + 1):
            for name, share in (("start", 0.0), ("resumed", SHARE)):
                command = [sys.executable, __file__, "--open", str(folder), "--share", str(share)]
                run = subprocess.run(command, capture_output=True, text=True, check=True)
                # The first repeat unpacks the shards and fills the machine's file cache.
                if repeat:
                    by_start[name].append(float(run.stdout.split()[-1]))
    medians = {name: statistics.median(seconds) for name, seconds in by_start.items()}
    return {
        "rows": rows,
        "sequence_length": LENGTH,
        "batch": BATCH,
        "share": SHARE,
        "seconds": {name: [round(value, 4) for value in seconds] for name, seconds in by_start.items()},
        "median_seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["resumed"] / medians["start"], 3),
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open is not None:
        print(open_once(options.open, options.share))
        return
    results = measure(options.rows, options.repeats)
    median = results["median_seconds"]
    rows = [
        ["at the start", f"{median['start']:.3f}", "1.00"],
        [f"at {SHARE:.0%} of the epoch", f"{median['resumed']:.3f}", f"{results['ratio']:.2f}"],
    ]
    header = ["first batch", "seconds (median)", "over the start"]
    print(save("open_dataset", "Opening a dataset", "make bench-data", header, rows, results))


if __name__ == "__main__":
    main()
