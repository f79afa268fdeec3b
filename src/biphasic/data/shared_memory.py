"""Shared memory that killed runs leave behind, and that makes the next one refuse its own data folder."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PATIENCE = 60.0
"""Seconds. Jobs on several machines could wait for each other in a ring; then it is better to take the chance."""
_STREAMING = re.compile(r"^\d{6}_\w+$")


def free_stale_shared_memory(folder: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[str]:
    """Remove Streaming's shared memory that no living process of this machine holds.

    Streaming's own `clean_stale_shared_memory` removes everybody's, a live job's included. Here a group of names (one
    job's prefix) goes only when none of them is mapped by any process that this user can see; another user's files
    can't be removed anyway.

    Returns:
        The names that were removed.
    """
    with one_job_at_a_time():
        return _free(folder, processes)


def _free(folder: Path, processes: Path) -> list[str]:
    names = [path.name for path in folder.glob("*_*") if _STREAMING.match(path.name)] if folder.is_dir() else []
    if not names:
        return []
    held: set[str] = set()
    for maps in processes.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue  # The process ended, or belongs to somebody else.
        held |= {Path(line.split(maxsplit=5)[-1]).name.split("_")[0] for line in lines if str(folder) in line}
    removed = []
    for name in sorted(names):
        if name.split("_")[0] not in held:
            try:
                (folder / name).unlink()
            except OSError:
                continue
            removed.append(name)
    return removed


@contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Let this machine's jobs take names in shared memory one after the other.

    Streaming looks for a free name and then takes it, and two jobs that start together may find the same; and what one has
    just made, and not mapped yet, another one's cleaning could take for a dead job's. One rank of a job on this machine
    takes the names, the first.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    lock = FileLock(Path(tempfile.gettempdir()) / f"biphasic-{os.getuid()}.lock")
    with suppress(Timeout):
        lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        lock.release()
