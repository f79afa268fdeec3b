"""What lies in a conversion's output, for comparing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Stored = list[dict[str, np.ndarray]]


def rows_in(folder: Path) -> Stored:
    """The rows as the training will read them."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=False, batch_size=1, validate_hash="xxh64")
    return [dataset[number] for number in range(len(dataset))]


def segments_in(folder: Path) -> list[np.ndarray]:
    """The tokens of each segment, in order."""
    found = []
    for row in rows_in(folder):
        ends = np.cumsum(row["lengths"])
        found += [row["tokens"][end - length : end] for end, length in zip(ends, row["lengths"], strict=True)]
    return found


def same_bytes(one: Path, two: Path) -> bool:
    """Whether two outputs hold the same data: all files but the records and the log, which tell times and places."""

    def content(folder: Path) -> dict[str, bytes]:
        names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        told = ("tasks/", "conversion.")
        return {name: path.read_bytes() for name, path in names.items() if not name.startswith(told)}

    return content(one) == content(two) and "train/index.json" in content(one)
