"""What lies in a conversion's output, for comparing."""

from pathlib import Path
from typing import Any

import numpy as np

Stored = list[dict[str, np.ndarray]]


def open_dataset(local: Path, remote: str | None = None) -> Any:
    """Open a split with Streaming, with names in shared memory that no other job on this machine takes."""
    from streaming import StreamingDataset

    from biphasic.data.shared_memory import names_chosen_by_local_rank_0

    with names_chosen_by_local_rank_0():
        return StreamingDataset(local=str(local), remote=remote, shuffle=False, batch_size=1, validate_hash="xxh64")


def rows_in(folder: Path) -> Stored:
    """The rows as the training will read them."""
    dataset = open_dataset(folder)
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
