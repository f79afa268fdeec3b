"""Names in shared memory, which Streaming's datasets of all jobs on a machine share."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer.utils import dist
from filelock import FileLock
from streaming.base import dataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory, prefix
from streaming.base.world import World

from biphasic.storage import short
from biphasic.versions import require_form

_MEMORY, _PROCESSES = Path("/dev/shm"), Path("/proc")
_STREAMING = re.compile(r"^\d{6}_\w+$")
_PATIENCE = 15.0
"""Seconds. The loader processes of a rank that was killed hold its cache until they see that it is gone."""


def free_stale_shared_memory(folder: Path = _MEMORY, processes: Path = _PROCESSES) -> list[str]:
    """Remove Streaming's shared memory that no living process of this machine holds.

    Streaming's own `clean_stale_shared_memory` removes everybody's, a live job's included. Here a group of names (one
    dataset's number) is removed only when none of them is mapped by any process that this user can see; another user's
    files can't be removed anyway.

    Returns:
        The names that were removed.
    """
    names = [path.name for path in folder.glob("*_*") if _STREAMING.match(path.name)] if folder.is_dir() else []
    if not names:
        return []
    held = {name.split("_")[0] for maps in processes.glob("[0-9]*/maps") for name in _mapped(maps, folder)}
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
def names_from_first_rank() -> Iterator[None]:
    """Have the datasets that are opened in this block take their names as `_take_names` does.

    Streaming's ranks each look for a free number, and only then the first one takes it: when another job starts or ends
    meanwhile, they find different ones.

    Raises:
        UserError: this version of Streaming takes names in another way.
    """
    original = require_form("mosaicml-streaming", dataset, "get_shm_prefix", _take_names)
    setattr(dataset, original.__name__, _take_names)
    try:
        yield
    finally:
        setattr(dataset, original.__name__, original)


def _take_names(
    streams_local: list[str], streams_remote: list[str | None], world: World, retry: int = 0
) -> tuple[int, SharedMemory]:
    """Take a free number on each machine, and tell its ranks.

    The lock covers what one process does by itself, so that jobs on several machines can't wait for each other in a ring.

    Returns:
        The number, and the memory that marks it as taken and lists the dataset's folders.

    Raises:
        ValueError: on all ranks: two streams have the same folder, or another job has a stream's cache.
    """
    memory, answer = None, None
    if world.is_local_leader:
        try:
            prefix._check_self(streams_local)
            answer, memory = _register(streams_local, streams_remote)
        except (OSError, ValueError) as error:
            answer = short(error)
    answers: list[int | str | None] = dist.all_gather_object(answer)
    for fault in answers:
        if isinstance(fault, str):
            raise ValueError(fault)
    number = answers[dist.get_global_rank() - dist.get_local_rank()]
    assert isinstance(number, int)
    return number, memory or SharedMemory(prefix._get_path(number, LOCALS), False)


def _register(streams_local: list[str], streams_remote: list[str | None]) -> tuple[int, SharedMemory]:
    caches = [local for local, remote in zip(streams_local, streams_remote, strict=True) if remote is not None]
    end = time.monotonic() + _PATIENCE
    while True:
        # Shared memory exists before it is mapped, and would look stale in between: hence one lock for both.
        with FileLock(_MEMORY / f"biphasic-{os.getuid()}.lock"):
            freed = free_stale_shared_memory()
            fault = _conflict(caches)
            if fault is None:
                return _first_free(streams_local, freed)
        if time.monotonic() > end:
            raise ValueError(fault)
        time.sleep(0.2)


def _first_free(streams_local: list[str], freed: list[str]) -> tuple[int, SharedMemory]:
    locks = Path(tempfile.gettempdir())
    for number in itertools.count():
        names = [prefix._get_path(number, name) for name in SHM_TO_CLEAN]
        files = [_MEMORY / name for name in names]
        files += [locks / prefix._get_path(number, name) for name in (BARRIER_FILELOCK, CACHE_FILELOCK)]
        # Python's resource tracker of the job that was killed may be about to remove what was freed.
        if any(path.exists() for path in files) or not set(names).isdisjoint(freed):
            continue
        content = prefix._pack_locals(streams_local, number)
        try:
            memory = SharedMemory(prefix._get_path(number, LOCALS), True, len(content))
        except FileExistsError:  # taken by another user's job
            continue
        memory.buf[: len(content)] = content
        return number, memory
    raise AssertionError


def _conflict(caches: list[str]) -> str | None:
    """Which cache another job has. Streaming's own check ends with the other job's first batch."""
    if not caches:
        return None
    own = _mapped(_PROCESSES / "self" / "maps", _MEMORY)
    for path in _MEMORY.glob(f"*_{LOCALS}"):
        try:
            theirs, _ = prefix._unpack_locals(path.read_bytes())
        except (OSError, ValueError, IndexError):
            continue
        if path.name not in own and (shared := set(caches) & set(theirs)):
            return (
                f"{min(shared)} is the cache of another job that is running on this machine: give each job a cache of its "
                "own (`local` of the stream)"
            )
    return None


def _mapped(maps: Path, folder: Path) -> set[str]:
    """Names of the files in `folder` that a process has mapped; empty when it has ended or belongs to another user."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[-1].removesuffix(" (deleted)")).name for line in lines if str(folder) in line}
