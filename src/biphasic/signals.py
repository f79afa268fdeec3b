"""Record signals in a process that starts others, instead of ending it, and end a process when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1


@contextmanager
def noted_signals(numbers: Sequence[signal.Signals], interrupt_on_second: bool = False) -> Iterator[list[str]]:
    """Yield a list to which the name of each of these signals is appended when it arrives.

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
    """Ask the kernel to kill this process as soon as its parent, the process with this id, dies.

    A worker that outlives its driver could write a record while the next driver runs the same work.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
