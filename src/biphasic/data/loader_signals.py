"""Loader processes and the signals that end a run: the batch that is being finished needs them."""

from __future__ import annotations

import atexit
import mmap
import os
import signal

_closing = mmap.mmap(-1, 1)
"""Shared with the processes that are forked from this one."""


def keep_loaders() -> None:
    """From now on loader processes survive SIGTERM and SIGUSR1, which a preemption sends to all processes there are."""
    _closing[0] = 0


def let_loaders_go() -> None:
    """From now on SIGTERM ends them, as PyTorch does it."""
    _closing[0] = 1


def in_loader(worker: int) -> None:
    """A DataLoader's `worker_init_fn`."""
    parent = os.getppid()

    def leave(number: int, frame: object) -> None:
        if _closing[0] or os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


let_loaders_go()
# Before multiprocessing ends its processes, and waits for them.
atexit.register(let_loaders_go)
