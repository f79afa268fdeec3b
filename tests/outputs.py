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
    segments = []
    for row in rows_in(folder):
        ends = np.cumsum(row["lengths"])
        segments += [row["tokens"][end - length : end] for end, length in zip(ends, row["lengths"], strict=True)]
    return segments


def same_bytes(first: Path, second: Path) -> bool:
    """Whether two outputs hold the same data: all files but the records and the log, which hold times and paths."""

    def content(folder: Path) -> dict[str, bytes]:
        names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        records = ("units/", "conversion.")
        return {name: path.read_bytes() for name, path in names.items() if not name.startswith(records)}

    return content(first) == content(second) and "train/index.json" in content(first)
