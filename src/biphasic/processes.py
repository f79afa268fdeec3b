"""What this machine lets a process use (cores, open files, sockets), and what signals do to commands and their processes."""

import ctypes
import os
import platform
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from threading import Thread
from types import FrameType
from typing import NoReturn

from biphasic.errors import PREEMPTED, UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers and clouds send before they take a machine, and what arrives when a terminal is closed."""
INTERRUPTED = 130
"""Exit status after Ctrl-C (128 + SIGINT)."""
SAME_COMMAND = "what is finished is kept, and the same command does the rest"

_MOST_FILES = 65_536
"""Some programs take longer to start the higher their limit is."""
_TEMPORARY_BYTES = 75
"""Longest path of a temporary folder: a socket's has at most 107 bytes, 32 of which are `/pymp-…/listener-…`."""
_PR_SET_PDEATHSIG = 1
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocators() -> None:
    """Set PyTorch's memory allocator, which it reads when it is imported, unless the environment has done so.

    Expandable segments of GPU memory cause less fragmentation, but WSL's driver fails on them.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES) and "microsoft" not in platform.release().lower():
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


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


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command as this process, and exit with the status that it returns.

    Until then a stop signal ends the process at once with status 75 and a line, also while its main thread waits in a
    library, unless the command has a handler of its own. Afterwards stop signals are ignored, since the command was not
    stopped. Signals that are ignored stay so, such as SIGHUP under `nohup`.
    """
    global _is_command
    _is_command = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    os.register_at_fork(after_in_child=_forget_signals)
    ends = Thread(target=_end_on_signals, args=(read,), name="signals", daemon=True)
    ends.start()
    try:
        status = main()
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:  # Composer's handler ends the main thread, and `ends` the process
            signal.signal(signal.SIGTERM, _stop)  # a second signal, Composer's launcher's, would end the wait
            ends.join(1.0)
        raise
    finally:
        # When Python ends, it restores the default handler of a signal that is not ignored.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _taken.clear()
    sys.exit(status)


def _stop(number: int, frame: FrameType | None) -> None:
    """Note a signal. `_end_on_signals` learns of it even if the main thread doesn't get here, such as in a collective."""
    _taken.add(number)


_taken: set[int] = set()
"""The signals that have come to `_stop`. By the time that `_end_on_signals` acts, a run may have a handler of its own."""
_is_command = False
"""Whether `run_command` runs this process."""


def ends_command(handler: object) -> bool:
    """Return whether a signal's handler is that of `run_command`, or Composer's, which its import puts in its place."""
    return _is_command and (handler is _stop or getattr(handler, "__module__", "") == "composer.core.engine")


def _end_on_signals(pipe: int) -> None:
    interrupted = False
    while True:
        numbers = os.read(pipe, 64)
        # Two signals at once arrive in any order.
        if select.select([pipe], [], [], 0.1)[0]:
            numbers += os.read(pipe, 64)
        # Composer's launcher sends SIGTERM soon after Ctrl-C, while the command still ends.
        interrupted = interrupted or signal.SIGINT in numbers
        for number in numbers:
            is_for_command = number in _taken or ends_command(signal.getsignal(number))
            if number not in STOP_SIGNALS or interrupted or not is_for_command:
                continue
            if os.environ.get("LOCAL_RANK", "0") != "0":
                os.kill(os.getpid(), signal.SIGKILL)  # the launcher would print this rank's output after another status
            # Not `print`, because the main thread may hold the lock of its stream.
            os.write(2, f"{signal.Signals(number).name}: stopped; {SAME_COMMAND} (status {PREEMPTED})\n".encode())
            os._exit(PREEMPTED)


def _forget_signals() -> None:
    """In a forked process, restore what signals do: its parent's pipe is not for its signals."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)


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
