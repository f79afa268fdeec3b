"""Faults of a job's ranks: each is shown once, by the rank that has it, and all ranks end with one exit status.

Composer's launcher ends all ranks as soon as one has failed. So a rank that fails first tells the others, through the store
at `MASTER_PORT` that rank 0 holds, and they end together. A thread listens on each rank, because the main thread may be
waiting in a collective for the rank that failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event, Lock, Thread, Timer
from typing import Any

from biphasic.config.errors import PREEMPTED, ConfigError, Preempted, UserError, is_lost_rank
from biphasic.storage import short

FAILED, REFUSED = 1, 2
"""Exit statuses: starting again may help; a person has to change something first."""
_LOOK_EVERY = 1.0
_OWN_WAY = 3.0
"""Seconds for a main thread to end by itself after another rank's fault: often all ranks have the same one."""
_CLOSING = 25.0
"""Seconds that ranks wait until all have closed their uploads and loggers. Composer's launcher kills after 30."""
_CONNECTING = timedelta(minutes=30)
_FIRST = "first"


def run_together(job: Callable[[], int]) -> int:
    """Run one rank's part of a job, and end it together with the other ranks.

    Args:
        job: returns its exit status, or raises.

    Returns:
        The exit status: the job's, or 1 when it failed, 2 when a person has to change something, 75 when it was preempted.
        A rank that has nothing to show and is not its node's first returns 0: the launcher prints the output of all others.
    """
    global _ranks
    _ranks = _Ranks() if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    try:
        return job()
    except Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"{stop}; status {PREEMPTED}: start the same command again and it goes on")
        return PREEMPTED
    except Exception as error:
        if _ranks is not None:
            return _ranks.end(error)
        if not isinstance(error, ConfigError | UserError):
            raise
        print(error, file=sys.stderr)
        return REFUSED
    finally:
        if _ranks is not None:
            _ranks.stop()


@contextmanager
def closing(close: Callable[[str], None]) -> Iterator[None]:
    """Call `close` with the reason when an exception leaves the block, or before another rank's fault ends the process."""
    ranks = _ranks
    if ranks is not None:
        ranks.close = close
    try:
        yield
    except BaseException as error:
        if ranks is None or isinstance(error, Preempted) or not isinstance(error, Exception):
            close(_Fault.of(error).line)
        else:
            close(ranks.report(error))
        raise
    finally:
        if ranks is not None:
            ranks.close = None


@dataclass(frozen=True)
class _Fault:
    """Why a rank fails; `lost`: it can't reach the others, which is no fault of its own."""

    rank: int
    node: int
    status: int
    text: str
    lost: bool = False

    @classmethod
    def of(cls, error: BaseException) -> _Fault:
        rank, node = int(os.environ.get("RANK", "0")), int(os.environ.get("NODE_RANK", "0"))
        if is_lost_rank(error):
            text = "another rank ended in the middle of a step without a message: it was killed or its machine was lost"
            return cls(rank, node, FAILED, text, lost=True)
        if "EADDRINUSE" in str(error) and "MASTER_PORT" in os.environ:
            text = f"MASTER_PORT {os.environ['MASTER_PORT']} is in use by another program: start again"
            return cls(rank, node, FAILED, text, lost=True)
        if isinstance(error, ConfigError | UserError):
            return cls(rank, node, REFUSED, str(error))
        text = short(error) if isinstance(error, Preempted) else f"{type(error).__name__}: {short(error)}"
        return cls(rank, node, FAILED, text)

    @property
    def line(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.line}"


class _Ranks:
    """This rank's fault, and what it hears of the others'."""

    def __init__(self) -> None:
        import torch.distributed  # noqa: F401 - here, and not in two threads at once

        self.close: Callable[[str], None] | None = None
        self._rank, self._count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local, self._node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("NODE_RANK", "0"))
        self._error: Exception | None = None
        self._own: _Fault | None = None
        self._first: _Fault | None = None
        """The first fault of any rank; None: not known."""
        self._shown_below = False
        """A lower rank of this node shows the same."""
        self._lock, self._taken, self._stopped = Lock(), False, False
        """Whether the listening thread ends this process, and whether it listens no longer."""
        self._wake, self._known, self._closed, self._met = Event(), Event(), Event(), Event()
        self._thread = Thread(target=self._listen, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no longer."""
        with self._lock:
            self._stopped = not self._taken
        self._step_aside()
        self._wake.set()
        self._thread.join(_LOOK_EVERY)

    def report(self, error: Exception) -> str:
        """Tell the other ranks of an error; returns why the job ends, in a line: it may be another rank's fault."""
        with self._lock:
            if self._own is None and not self._taken:
                self._error, self._own = error, _Fault.of(error)
        self._step_aside()
        assert self._own is not None
        self._hurry_on_sigterm()
        self._wake.set()
        self._known.wait(_CLOSING)
        first = self._first or self._own
        return str(first) if self._own.lost and not first.lost else self._own.line

    def end(self, error: Exception) -> int:
        """Wait for the other ranks, and show the error if it is this rank's to show; returns the exit status."""
        self.report(error)
        self._hurry_on_sigterm()
        self._closed.set()
        if self._known.is_set():
            self._met.wait(_CLOSING)
        # Python gives a handler's signal back to the system before it ends.
        _on_sigterm(signal.SIG_IGN)
        return self._show()

    def _step_aside(self) -> None:
        """Wait for the end when the listening thread brings it about."""
        if self._taken:
            Event().wait()

    def _hurry_on_sigterm(self) -> None:
        """Don't wait for the others when the launcher ends all ranks: it kills them half a minute later."""

        def hurry(number: int, frame: object) -> None:
            for event in (self._known, self._met):
                Timer(1.0, event.set).start()

        _on_sigterm(hurry)

    def _listen(self) -> None:
        # Without rank 0, whose store is gone with it, each rank ends by itself.
        with suppress(RuntimeError, KeyError):
            self._exchange()
        self._known.set()
        self._met.set()
        if self._taken:
            status = self._show()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _exchange(self) -> None:
        from torch import distributed

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The server is shared with the process group's own store.
        holder = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, port, None, self._rank == 0, _CONNECTING, wait_for_workers=False, multi_tenant=True
        )
        store = distributed.PrefixStore("biphasic", holder)  # pyright: ignore[reportPrivateImportUsage]
        while not self._wake.wait(_LOOK_EVERY):
            if store.check([_FIRST]):
                self._first = _Fault(**json.loads(store.get(_FIRST)))
                self._wake.wait(_OWN_WAY)
                break
        with self._lock:
            if self._stopped:
                return
            self._taken = self._own is None
        if self._own is not None:
            store.set(f"text of {self._rank}", self._own.text)
            self._first = _Fault(**json.loads(store.compare_set(_FIRST, "", json.dumps(asdict(self._own)))))
        assert self._first is not None
        self._known.set()
        if self._taken:
            self._close(self._first)
        else:
            self._closed.wait()
        # A rank that is lost does not come.
        count = self._count - self._first.lost
        self._meet(store, "closed", count)
        below = [f"text of {rank}" for rank in range(self._rank - self._local, self._rank)]
        texts = [store.get(key).decode() for key in below if store.check([key])]
        self._shown_below = self._own is not None and self._own.text in texts
        self._meet(store, "looked", count if self._rank == 0 else 0)

    def _close(self, first: _Fault) -> None:
        timer = Timer(_CLOSING, os._exit, [first.status])
        timer.daemon = True
        timer.start()
        if self.close is not None:
            with suppress(Exception):
                self.close(str(first))

    def _meet(self, store: Any, name: str, count: int) -> None:
        store.add(name, 1)
        end = time.monotonic() + _CLOSING
        while store.add(name, 0) < count and time.monotonic() < end:
            time.sleep(0.05)

    def _show(self) -> int:
        own, first = self._own, self._first or self._own
        assert first is not None
        if own is not None and not self._shown_below and (own.status == REFUSED or own.text == first.text):
            if own.lost:
                print(own, file=sys.stderr)
            elif own.status == REFUSED:
                print(own.text, file=sys.stderr)
            else:
                traceback.print_exception(self._error)
        elif self._local:
            return 0
        elif first.node != self._node:
            print(f"{first} (on node {first.node})", file=sys.stderr)
        return first.status


def _on_sigterm(handler: Any) -> None:
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, handler)


_ranks: _Ranks | None = None
