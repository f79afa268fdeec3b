"""The files in which ranks that a signal ended leave their stacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from biphasic.checkpointing.open_run import read_crashes, remove_empty_files


def test_a_folder_that_another_rank_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run each rank removes its file, and the folder once it is empty."""
    path = tmp_path / "one-rank1.txt"
    path.write_text("Fatal Python error: Aborted\n")
    assert read_crashes(tmp_path, "one") == [f"rank 1: Aborted ({path})"]

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", glob)
    assert read_crashes(tmp_path, "one") == []
    remove_empty_files(tmp_path)
