"""Choose the shared-memory names of Streaming datasets so that several jobs can run on one node.

Streaming names a dataset's shared memory `<number>_<name>`, in the folder `/dev/shm` that all jobs on the node use.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory
from pathlib import Path

from composer.utils import dist
from filelock import FileLock
from streaming.base import dataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory, memory, prefix
from streaming.base.world import World

from biphasic.storage import first_line
from biphasic.versions import require_form

_SHARED_MEMORY, _PROCESSES = Path("/dev/shm"), Path("/proc")
_STREAMING_NAME = re.compile(r"^\d{6}_\w+$")
_NAMES = (*SHM_TO_CLEAN, BARRIER_FILELOCK, CACHE_FILELOCK)
_LOCK_FILE_SECONDS = 60.0
_CACHE_WAIT_SECONDS = 15.0
"""How long to wait for a cache, because a killed rank's loader processes keep it until they notice its end."""
_SIZE_WAIT_SECONDS = 30.0
"""How long to wait for another rank to set the size of the shared memory that it has created."""


class _SizedSharedMemory(shared_memory.SharedMemory):
    """Python's shared memory, but opening it waits until the process that created it has set its size.

    Creating takes two system calls. Streaming's ranks wait 7 ms between a failed creation and opening, which is too
    short on a busy machine: they then fail with "cannot mmap an empty file".
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0):
        end = time.monotonic() + _SIZE_WAIT_SECONDS
        while True:
            try:
                super().__init__(name, create, size)
                return
            except ValueError:
                if create or time.monotonic() > end:
                    raise
                self.close()
                time.sleep(0.01)


def wait_for_sizes_of_shared_memory() -> None:
    """Let Streaming's datasets wait for the size of shared memory that another rank has just created.

    Raises:
        UserError: this version of Streaming opens shared memory differently.
    """
    name = "BuiltinSharedMemory"
    require_form("mosaicml-streaming", memory, name, _SizedSharedMemory)
    setattr(memory, name, _SizedSharedMemory)


def free_stale_shared_memory(
    folder: Path = _SHARED_MEMORY, processes: Path = _PROCESSES, locks: Path | None = None
) -> list[str]:
    """Remove Streaming's shared memory that no running process on this node has mapped, and lock files of no dataset.

    Streaming's own `clean_stale_shared_memory` also removes the shared memory of running jobs. This function removes a
    dataset's names, which start with the same number, only if no process visible to this user has mapped any of them.
    Streaming never removes its lock files, in the folder for temporary files (`locks`).

    Returns:
        The removed names in shared memory.
    """
    paths = sorted(path for path in folder.glob("*_*") if _STREAMING_NAME.match(path.name))
    _remove_old_lock_files(locks or Path(tempfile.gettempdir()), {path.name.split("_")[0] for path in paths})
    unused = {path.name.split("_")[0] for path in paths}
    # This process first: in most cases nobody else's memory maps have to be read, which takes milliseconds a process.
    for process in [processes / "self", *processes.glob("[0-9]*")] if paths else []:
        unused -= {name.split("_")[0] for name in _mapped_names(process / "maps", folder)}
        if not unused:
            break
    removed = []
    for path in paths:
        if path.name.split("_")[0] in unused:
            try:
                path.unlink()
            except OSError:
                continue
            removed.append(path.name)
    return removed


def _remove_old_lock_files(folder: Path, numbers: set[str]) -> None:
    """Remove this user's lock files of datasets without shared memory that were last locked some time ago.

    A killed job's resource tracker (Python's) may still remove the names of its number, which must not be reused before.
    """
    before = time.time() - _LOCK_FILE_SECONDS
    for path in folder.glob("*_filelock"):
        if _STREAMING_NAME.match(path.name) and path.name.split("_")[0] not in numbers:
            with suppress(OSError):
                about = path.stat()
                if about.st_uid == os.getuid() and about.st_mtime < before:
                    path.unlink()


@contextmanager
def names_chosen_by_local_rank_0() -> Iterator[None]:
    """Let local rank 0 of each node choose the shared-memory names of datasets opened in this block.

    In Streaming, each rank looks for a free number before local rank 0 takes one. If another job starts or ends
    meanwhile, the ranks find different numbers.

    Raises:
        UserError: this version of Streaming chooses names differently.
    """
    original = require_form("mosaicml-streaming", dataset, "get_shm_prefix", _choose_names)
    setattr(dataset, original.__name__, _choose_names)
    try:
        yield
    finally:
        setattr(dataset, original.__name__, original)


def _choose_names(
    streams_local: list[str], streams_remote: list[str | None], world: World, retry: int = 0
) -> tuple[int, SharedMemory]:
    """Take a free number on each node, and send it to the node's ranks.

    No collective runs while the lock is held, so that jobs on several nodes can't deadlock.

    Returns:
        The number, and the shared memory that reserves it and lists the dataset's folders.

    Raises:
        ValueError: two streams have the same folder, or another job uses a stream's cache. Raised on all ranks.
    """
    reserved, answer = None, None
    if world.is_local_leader:
        try:
            prefix._check_self(streams_local)
            answer, reserved = _register(streams_local, streams_remote)
        except (OSError, ValueError) as error:
            answer = first_line(error)
    answers: list[int | str | None] = dist.all_gather_object(answer)
    for fault in answers:
        if isinstance(fault, str):
            raise ValueError(fault)
    number = answers[dist.get_global_rank() - dist.get_local_rank()]
    assert isinstance(number, int)
    return number, reserved or SharedMemory(prefix._get_path(number, LOCALS), False)


def _register(streams_local: list[str], streams_remote: list[str | None]) -> tuple[int, SharedMemory]:
    caches = [local for local, remote in zip(streams_local, streams_remote, strict=True) if remote is not None]
    end = time.monotonic() + _CACHE_WAIT_SECONDS
    while True:
        # Names are removed and taken under one lock, because new shared memory looks stale until it is mapped.
        with FileLock(_SHARED_MEMORY / f"biphasic-{os.getuid()}.lock"):
            removed = free_stale_shared_memory()
            fault = _cache_conflict(caches)
            if fault is None:
                return _take_free_number(streams_local, removed)
        if time.monotonic() > end:
            raise ValueError(fault)
        time.sleep(0.2)


def _take_free_number(streams_local: list[str], removed: list[str]) -> tuple[int, SharedMemory]:
    # Removed names are not reused, because a killed job's resource tracker (Python's) may still remove them.
    taken = {*removed, *os.listdir(_SHARED_MEMORY), *os.listdir(tempfile.gettempdir())}
    for number in itertools.count():
        if not taken.isdisjoint(prefix._get_path(number, name) for name in _NAMES):
            continue
        content = prefix._pack_locals(streams_local, number)
        try:
            reserved = SharedMemory(prefix._get_path(number, LOCALS), True, len(content))
        except FileExistsError:  # taken by another user's job
            continue
        reserved.buf[: len(content)] = content
        return number, reserved
    raise AssertionError


def _cache_conflict(caches: list[str]) -> str | None:
    """Return an error message if another job uses one of the caches.

    Streaming's own check works only until the other job's first batch.
    """
    own = _mapped_names(_PROCESSES / "self" / "maps", _SHARED_MEMORY) if caches else set()
    for path in _SHARED_MEMORY.glob(f"*_{LOCALS}") if caches else []:
        try:
            locals_of_job, _ = prefix._unpack_locals(path.read_bytes())
        except (OSError, ValueError, IndexError):
            continue
        if path.name not in own and (shared := set(caches) & set(locals_of_job)):
            return (
                f"{min(shared)} is the cache of another job that is running on this machine: give each job a cache of its "
                "own (`local` of the stream)"
            )
    return None


def _mapped_names(maps: Path, folder: Path) -> set[str]:
    """Return the names of the files in `folder` that a process has mapped.

    The result is empty if the process has ended or belongs to another user.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[-1].removesuffix(" (deleted)")).name for line in lines if str(folder) in line}
