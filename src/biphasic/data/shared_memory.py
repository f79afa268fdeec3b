"""Choose the shared-memory names of Streaming datasets so that several jobs can run on one node.

Streaming names a dataset's shared memory `<number>_<name>`, in the folder `/dev/shm` that all jobs on the node use. Here
each number also has a file `biphasic_<number>`, which the job's processes lock (`flock`) as long as they live. Containers
that share the folder see these locks although they don't see each other's processes, and the kernel releases them when a
process dies. Numbers are random, because Python's resource tracker may remove a killed job's names later.
"""

import atexit
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import IO, Any

from composer.utils import dist
from filelock import FileLock
from streaming.base import dataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory, memory, prefix
from streaming.base.world import World

from biphasic.amounts import format_bytes
from biphasic.errors import UserError, first_line
from biphasic.versions import require_form

_Reserved = tuple[int, SharedMemory]
_SHARED_MEMORY = Path("/dev/shm")
_FILE_LOCKS = (BARRIER_FILELOCK, CACHE_FILELOCK)
_LOCK_FILE = re.compile(r"^biphasic_(\d{6})$")
_CACHE_WAIT_SECONDS = 15.0
"""How long to wait for a cache, because a killed rank's loader processes keep it until they notice its end."""
_SIZE_WAIT_SECONDS = 30.0
"""How long to wait for another rank to set the size of the shared memory that it has created."""


class _SizedSharedMemory(shared_memory.SharedMemory):
    """Python's shared memory, but opening it waits until the process that created it, in two system calls, sets its size.

    Streaming's ranks wait 7 ms, too short on a busy machine: they then fail with "cannot mmap an empty file".
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


def require_shared_memory(rows: int, row_length: int, batch_rows: int, loaders: int) -> str:
    """Return a line on /dev/shm, whose room must suffice: where it ends, the kernel ends the process (SIGBUS, "Bus error").

    Streaming keeps the order of an epoch's `rows` there, and each of this machine's `loaders` processes up to three batches
    of `batch_rows` rows of `row_length` tokens. Raises a UserError if there is less room.
    """
    # A row's place takes at most 8 bytes, a token 12.
    need = 8 * rows + 12 * row_length * batch_rows * 3 * loaders
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < need:
        problem = f"the order of {rows:,} rows and the loaders' batches need {format_bytes(need)}"
        options = "docker run --shm-size=16g or, in Kubernetes, an emptyDir of medium Memory there"
        advice = f"start the container with more, such as {options}"
        raise UserError(f"{_SHARED_MEMORY}: {format_bytes(free)} free, but {problem}: {advice}")
    return f"{_SHARED_MEMORY}: {format_bytes(free)} free for {format_bytes(need)}"


def remove_stale_shared_memory() -> None:
    """Remove the shared memory of jobs that have no process left in any container that shares the folder.

    Streaming's own `clean_stale_shared_memory` also removes the shared memory of running jobs. Memory without a lock
    file belongs to other programs and is kept.
    """
    for path in _SHARED_MEMORY.glob("biphasic_*"):
        if match := _LOCK_FILE.match(path.name):
            with suppress(OSError):
                _remove_unless_locked(int(match[1]))


def _remove_unless_locked(number: int) -> None:
    """Remove a number's memory and lock files. Raises an OSError if they are locked, or another user's."""
    with _lock_path(number).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in _SHARED_MEMORY.glob(prefix._get_path(number, "*")):
            path.unlink(missing_ok=True)
        # Streaming's own lock files, in the folder for temporary files, would remain forever.
        for name in _FILE_LOCKS:
            Path(tempfile.gettempdir(), prefix._get_path(number, name)).unlink(missing_ok=True)
        _lock_path(number).unlink(missing_ok=True)


def _lock_path(number: int) -> Path:
    return _SHARED_MEMORY / f"biphasic_{number:06}"


def _lock(number: int, mode: str) -> IO[bytes]:
    """Open a number's lock file and lock it, until the process ends or `_reserve` releases it."""
    lock: IO[bytes] = _lock_path(number).open(mode)
    fcntl.flock(lock, fcntl.LOCK_SH)
    # The shared memory is created later, so that Streaming removes it first at exit.
    atexit.register(_release, number, lock)
    return lock


def _reserve(number: int, lock: IO[bytes], shared: SharedMemory) -> SharedMemory:
    """Keep the lock only as long as the shared memory object that reserves the number exists, and return this object."""
    _held[number] = shared
    weakref.finalize(shared, _release, number, lock).atexit = False
    return shared


def _release(number: int, lock: IO[bytes]) -> None:
    if lock.closed:
        return
    lock.close()
    # The last process that has used the number removes what is left. In a loader process the parent's lock remains.
    with suppress(OSError):
        _remove_unless_locked(number)


_held: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()
"""The shared memory that reserves each number which this process uses."""


@contextmanager
def names_chosen_by_local_rank_0() -> Iterator[None]:
    """Let local rank 0 of each node choose the shared-memory names of datasets opened in this block.

    In Streaming, each rank looks for a free number before local rank 0 takes one. If another job starts or ends
    meanwhile, the ranks find different numbers. Raises a UserError if this version of Streaming chooses names
    differently.
    """
    sized = "BuiltinSharedMemory"
    require_form("mosaicml-streaming", memory, sized, _SizedSharedMemory)
    setattr(memory, sized, _SizedSharedMemory)
    original = require_form("mosaicml-streaming", dataset, "get_shm_prefix", _choose_names)
    setattr(dataset, original.__name__, _choose_names)
    try:
        yield
    finally:
        setattr(dataset, original.__name__, original)


def _choose_names(streams_local: list[str], streams_remote: list[Any], world: World, retry: int = 0) -> _Reserved:
    """Take a free number on each node. Return it and its shared memory, which lists the dataset's folders.

    Raises a ValueError on all ranks if two streams have the same folder, or another job uses a stream's cache.
    """
    # No collective runs while the lock is held, so that jobs on several nodes can't deadlock.
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
    if reserved is None:
        reserved = _reserve(number, _lock(number, "rb"), SharedMemory(prefix._get_path(number, LOCALS), False))
    return number, reserved


def _register(streams_local: list[str], streams_remote: list[Any]) -> _Reserved:
    caches = {local for local, remote in zip(streams_local, streams_remote, strict=True) if remote is not None}
    end = time.monotonic() + _CACHE_WAIT_SECONDS
    # The user's number may be another user's in another container.
    users = f"{os.getuid()}-{os.stat('/proc/self/ns/user').st_ino}"
    while True:
        # Caches are compared and taken under one lock.
        with FileLock(_SHARED_MEMORY / f"biphasic-{users}.lock"):
            remove_stale_shared_memory()
            fault = _cache_conflict(caches)
            if fault is None:
                return _take_free_number(streams_local)
        if time.monotonic() > end:
            raise ValueError(fault)
        time.sleep(0.2)


def _take_free_number(streams_local: list[str]) -> _Reserved:
    taken = {*os.listdir(_SHARED_MEMORY), *os.listdir(tempfile.gettempdir())}
    while True:
        number = secrets.randbelow(1_000_000)
        if not taken.isdisjoint(prefix._get_path(number, name) for name in (*SHM_TO_CLEAN, *_FILE_LOCKS)):
            continue
        content = prefix._pack_locals(streams_local, number)
        with suppress(FileExistsError):  # another job or program has taken it meanwhile
            lock = _lock(number, "xb")
            if not os.fstat(lock.fileno()).st_nlink:  # another job has locked it first, and removed it
                lock.close()
                continue
            try:
                reserved = SharedMemory(prefix._get_path(number, LOCALS), True, len(content))
            except FileExistsError:
                _lock_path(number).unlink()
                lock.close()
                raise
            reserved.buf[: len(content)] = content
            return number, _reserve(number, lock, reserved)


def _cache_conflict(caches: set[str]) -> str | None:
    # Streaming checks this only until that job's first batch.
    for path in _SHARED_MEMORY.glob(f"*_{LOCALS}") if caches else []:
        try:
            number, (locals_of_job, _) = int(path.name[:6]), prefix._unpack_locals(path.read_bytes())
        except (OSError, ValueError, IndexError):
            continue
        if number in _held or not (shared := caches & set(locals_of_job)):
            continue
        advice = f"give each job a cache of its own (`local` of the stream), or remove {path} if that job has ended"
        return f"{min(shared)} is the cache of another job that is running on this machine: {advice}"
    return None
