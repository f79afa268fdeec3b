"""What this machine lets a process use (cores, open files, sockets), and signals of processes that start others."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from types import FrameType

from biphasic.errors import UserError

_MOST_FILES = 65_536
"""Some programs take longer to start the higher their limit is."""
_TEMPORARY_BYTES = 75
"""Longest path of a temporary folder: a socket's has at most 107 bytes, 32 of which are `/pymp-…/listener-…`."""
_PR_SET_PDEATHSIG = 1


def raise_file_limit() -> None:
    """Let this process open up to 65,536 files and connections, if its hard limit allows. The usual limit is 1,024.

    A rank has three connections to each other rank, and a worker takes eight files of the process that starts it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    from joblib import cpu_count

    return cpu_count()


def require_short_temporary_folder() -> None:
    """Raise a UserError if sockets don't fit the temporary folder's path: a rank would wait for its loader forever."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    # Newer Pythons choose another folder by themselves.
    if length > _TEMPORARY_BYTES and util.get_temp_dir().startswith(folder):
        raise UserError(
            f"TMPDIR: {folder} has a path of {length} bytes, in which processes can't make sockets: expected at most "
            f"{_TEMPORARY_BYTES}, as TMPDIR=/tmp"
        )


@contextmanager
def noted_signals(numbers: Sequence[signal.Signals], interrupt_on_second: bool = False) -> Iterator[list[str]]:
    """Yield a list to which the name of each of these signals is appended when it arrives, instead of ending the process.

    Ignored signals stay ignored, such as SIGHUP under `nohup`. With `interrupt_on_second`, every signal after the first
    raises KeyboardInterrupt.
    """
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and interrupt_on_second:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    noted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in noted}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process with this id, dies: two must not do the same work."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
