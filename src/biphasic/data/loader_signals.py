"""Keep loader processes alive while a signal ends a run, because its last batch needs them, and end them with their rank."""

import atexit
import mmap
import multiprocessing
import os
import signal
import time
from multiprocessing import queues, resource_tracker
from multiprocessing.context import ForkContext
from queue import Empty
from typing import Any

from torch._C import _error_if_any_worker_fails
from torch.utils.data import DataLoader

from biphasic.processes import STOP_SIGNALS, die_with_parent


class _SharedFlag:
    """A flag in memory that is shared with the processes forked from this one.

    multiprocessing's event has a lock, which a process that is killed while it holds it never releases.
    """

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def clear(self) -> None:
        self._byte[0] = 0

    def is_set(self) -> bool:
        return self._byte[0] == 1


_exit_on_sigterm = _SharedFlag()
"""Whether SIGTERM ends loader processes."""


def keep_loaders() -> None:
    """Let loader processes survive SIGTERM, SIGUSR1 and SIGHUP, which a preemption sends to all processes."""
    _exit_on_sigterm.clear()


def release_loaders() -> None:
    """Let SIGTERM end loader processes again, as PyTorch expects."""
    _exit_on_sigterm.set()


def end_loaders() -> None:
    """End all loader processes within 2 s. PyTorch waits ten seconds for each that waits for one that has died."""
    release_loaders()
    processes, end = multiprocessing.active_children(), time.monotonic() + 2.0
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def handle_loader_signals(worker: int) -> None:
    """Set a loader process's signal handlers; used as a DataLoader's `worker_init_fn`."""
    parent = os.getppid()

    def on_sigterm(number: int, frame: object) -> None:
        if _exit_on_sigterm.is_set() or os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what `Loader` has blocked
    # PyTorch's loader processes check only between batches whether their parent is alive. One that waits in Streaming's
    # barrier for a killed rank's loader would wait forever, and keep the dataset's shared memory.
    die_with_parent(parent)


class _Queue(queues.Queue):  # pyright: ignore[reportMissingTypeArgument] - takes none before Python 3.12
    """As multiprocessing's queue, but raises why a loader process has died, as PyTorch's handler of SIGCHLD does.

    What the handler raises is lost where Python only prints errors, such as in a destructor.
    """

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            return super().get(block, timeout)
        except (OSError, EOFError, Empty) as error:
            if not isinstance(error, Empty):  # of the connection by which a tensor's memory is received
                time.sleep(1.0)  # the process may not have ended yet
            _error_if_any_worker_fails()
            raise


class _LoaderContext(ForkContext):
    """Starts loader processes with `fork`: since Python 3.14 the default is another, which doesn't share memory."""

    def Event(self) -> Any:  # PyTorch asks a context for it by this name
        return _SharedFlag()

    def Queue(self, maxsize: int = 0) -> Any:
        return _Queue(maxsize, ctx=self)


class Loader(DataLoader[Any]):
    """A DataLoader whose processes survive a signal from their start on, when PyTorch's handler would still end them."""

    def __init__(self, dataset: Any, *, num_workers: int, **settings: Any):
        context = _LoaderContext() if num_workers else None
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=context,
            worker_init_fn=handle_loader_signals,
            **settings,
        )

    def __iter__(self) -> Any:
        resource_tracker.ensure_running()  # its start unblocks SIGTERM; a loader process inherits this thread's mask
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


release_loaders()
# At exit multiprocessing sends SIGTERM to its processes and waits for them, so SIGTERM must end them by then.
atexit.register(release_loaders)
