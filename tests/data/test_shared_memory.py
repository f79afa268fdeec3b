"""Shared memory that killed runs leave behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from biphasic.data.shared_memory import free_stale_shared_memory


def test_only_memory_without_an_owner_is_freed(tmp_path: Path) -> None:
    memory, processes = tmp_path / "shm", tmp_path / "proc"
    (processes / "12").mkdir(parents=True)
    memory.mkdir()
    for name in ("000000_locals", "000000_barrier", "000001_locals", "sem.other", "torch_123_4"):
        (memory / name).touch()
    (processes / "12" / "maps").write_text(
        f"7f00-7f10 rw-s 00000000 00:1b 9  {memory}/000000_locals\n7f10-7f20 r-xp 0 0 0\n"
    )
    assert free_stale_shared_memory(memory, processes, tmp_path) == ["000001_locals"]
    assert sorted(path.name for path in memory.iterdir()) == [
        "000000_barrier",
        "000000_locals",
        "sem.other",
        "torch_123_4",
    ]


def test_old_lock_files_without_memory_are_removed(tmp_path: Path) -> None:
    """A lock file that was used a moment ago stays, and one of a dataset whose shared memory exists."""
    memory, locks = tmp_path / "shm", tmp_path / "locks"
    memory.mkdir()
    locks.mkdir()
    (memory / "000001_locals").touch()
    names = ["000000_barrier_filelock", "000000_cache_filelock", "000001_cache_filelock", "other_filelock"]
    for name in names:
        (locks / name).touch()
        os.utime(locks / name, (time.time() - 100,) * 2)
    (locks / "000002_cache_filelock").touch()
    free_stale_shared_memory(memory, tmp_path / "proc", locks)
    assert sorted(path.name for path in locks.iterdir()) == [
        "000001_cache_filelock",
        "000002_cache_filelock",
        "other_filelock",
    ]
