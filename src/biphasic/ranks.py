"""Run a job on all ranks: show each error once, and end the ranks together with the same exit status.

Composer's launcher terminates all ranks once one has exited with an error. Therefore, a failing rank first reports its
fault to the other ranks through rank 0's store at `MASTER_PORT`, and then all ranks end together. Each rank listens in a
thread, because its main thread may be waiting for the failed rank in a collective.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event, Lock, Thread, Timer
from typing import Any, TextIO

from biphasic.errors import PREEMPTED, ConfigError, Preempted, Unavailable, UserError, first_line, is_lost_rank
from biphasic.processes import INTERRUPTED, SAME_COMMAND, raise_file_limit

FAILED, REFUSED, UNREAD = 1, 2, 141
"""Exit statuses: a restart may help; something must be changed first; the reader of the output has closed the pipe (128 +
SIGPIPE)."""
INTERRUPTED_REASON = "interrupted with Ctrl-C (SIGINT)"
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 3.0
"""Time for the main thread to fail by itself after another rank's fault, since often all ranks have the same fault."""
_CLOSE_SECONDS = 25.0
"""Time for all ranks to close their uploads and loggers. Composer's launcher kills ranks after 30 seconds."""
_CONNECT_TIMEOUT = timedelta(minutes=30)
COLLECTIVE_SECONDS = 1800.0
"""Timeout of the process group: after it, a rank that waits for the others ends the run. Composer's 300 s would end a run
whose data stalls on one rank, for example while a bucket is slow. A rank that ends is noticed without it."""
_FIRST_FAULT = "first"
_ENDED = "ended in the middle of a step without a message: it was killed or aborted"


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its job, or its only one."""
    return os.environ.get("RANK", "0") == "0"


def print_once(line: str) -> None:
    """Print a line on rank 0."""
    if is_first_rank():
        print(line, flush=True)


def run_rank(job: Callable[[], int]) -> int:
    """Run one rank's part of a job. If a rank fails, end all ranks together.

    Returns the job's exit status; 1 if it failed or a bucket is unavailable, 2 if something must be changed first, 75
    if it was preempted, 130 after Ctrl-C, 141 if the reader of the output closed the pipe. A rank that shows no fault
    and is not local rank 0 returns 0, because the launcher prints the output of a rank with any other status.
    """
    global _ranks
    # With the umask 0 of some containers, anyone on the machine could replace checkpoints and records.
    os.umask(os.umask(0o022) | stat.S_IWOTH)
    raise_file_limit()
    _ranks = _Ranks() if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    try:
        return job()
    except Preempted as stop:
        if is_first_rank():
            print(f"{stop}; status {PREEMPTED}: start the same command again to resume")
        return PREEMPTED
    except (KeyboardInterrupt, SystemExit) as end:
        # Composer's handler of SIGINT exits with this status.
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        if is_first_rank():
            what = str(end) if isinstance(end, KeyboardInterrupt) and end.args else "interrupted"
            print(f"{what}: {SAME_COMMAND} (status {INTERRUPTED})", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if _ranks is not None:
            return _ranks.end(error)
        if isinstance(error, BrokenPipeError) and not _is_read(sys.stdout):
            return UNREAD
        if not isinstance(error, ConfigError | UserError):
            raise
        print(error, file=sys.stderr)
        return _Fault.of(error).status
    finally:
        if _ranks is not None:
            _ranks.stop()
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes once more when it ends, and would show the error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_read(stream: TextIO) -> bool:
    """Return False if a stream is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


@contextmanager
def close_on_fault(close: Callable[[str], None]) -> Iterator[None]:
    """Call `close` with the reason after an exception in the block, or before another rank's fault ends the process."""
    ranks = _ranks
    if ranks is not None:
        ranks.close = close
        # From here on, the rank before this one notices when this process ends.
        ranks.registered.wait(_CLOSE_SECONDS)
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
    """Why a rank failed. `lost` means that it could not reach other ranks, because of a fault elsewhere."""

    rank: int
    node: int
    status: int
    text: str
    lost: bool = False

    @classmethod
    def of(cls, error: BaseException) -> _Fault:
        status, text, lost = FAILED, f"{type(error).__name__}: {first_line(error)}", False
        if error.__cause__ is not None and str(error.__cause__):
            # Of a loader process that was killed, PyTorch says either that, or that it exited and gives that as the cause.
            text += f" ({first_line(error.__cause__)})"
        if is_lost_rank(error):
            text, lost = f"another rank, or its machine, {_ENDED}", True
        elif "EADDRINUSE" in str(error) and "MASTER_PORT" in os.environ:
            text, lost = f"MASTER_PORT {os.environ['MASTER_PORT']} is in use by another program: start again", True
        elif isinstance(error, ConfigError | UserError):
            status, text = FAILED if isinstance(error, Unavailable) else REFUSED, str(error)
        elif isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == INTERRUPTED):
            status, text = INTERRUPTED, INTERRUPTED_REASON
        elif isinstance(error, Preempted):
            text = first_line(error)
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("NODE_RANK", "0")), status, text, lost)

    @property
    def line(self) -> str:
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.line}"


class _Ranks:
    """Exchanges faults with the other ranks: this rank's own fault, and the first fault of any rank.

    The main thread ends the process after its own fault. Otherwise, the listening thread ends the process.
    """

    def __init__(self) -> None:
        # Composer's launcher sets 1, with which NCCL's watchdog aborts the communicators first, which may hang.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        import torch.distributed  # noqa: F401 - imported here so that two threads do not import it at once

        self.close: Callable[[str], None] | None = None
        self.registered = Event()
        """Set once the other ranks know this process, or never will."""
        self._rank, self._count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local, self._node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("NODE_RANK", "0"))
        self._next = self._rank - self._local + (self._local + 1) % int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """The next rank of this node, in a ring: this rank notices when its process has ended."""
        self._error: Exception | None = None
        self._own: _Fault | None = None
        self._first: _Fault | None = None
        self._shown_by_lower_rank = False
        self._lock = Lock()
        self._listener_ends_process, self._stopped = False, False
        self._wake, self._first_known, self._closed, self._all_done = Event(), Event(), Event(), Event()
        self._thread = Thread(target=self._listen, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = not self._listener_ends_process
        if self._listener_ends_process:
            Event().wait()
        self._wake.set()
        self._thread.join(_POLL_SECONDS)

    def report(self, error: Exception) -> str:
        """Report an error to the other ranks. Return one line on why the job ends, which may be another rank's fault."""
        with self._lock:
            if self._own is None and not self._listener_ends_process:
                self._error, self._own = error, _Fault.of(error)
        if self._listener_ends_process:
            Event().wait()
        assert self._own is not None

        def on_sigterm(number: int, frame: object) -> None:
            """Stop waiting for other ranks soon, because the launcher kills this rank 30 seconds later."""
            for event in (self._first_known, self._all_done):
                Timer(1.0, event.set).start()

        _handle_sigterm(on_sigterm)
        self._wake.set()
        self._first_known.wait(_CLOSE_SECONDS)
        first = self._first or self._own
        return str(first) if self._own.lost and first.text != self._own.text else self._own.line

    def end(self, error: Exception) -> int:
        """Wait for the other ranks, show the error unless another rank shows it, and return the exit status."""
        self.report(error)
        self._closed.set()
        if self._first_known.is_set():
            self._all_done.wait(_CLOSE_SECONDS)
        # Before the process ends, Python restores a signal's default handler unless the signal is ignored.
        _handle_sigterm(signal.SIG_IGN)
        return self._show()

    def _listen(self) -> None:
        # If rank 0 and its store are gone, each rank ends by itself.
        with suppress(RuntimeError, KeyError):
            self._exchange()
        self.registered.set()
        self._first_known.set()
        self._all_done.set()
        if self._listener_ends_process:
            status = self._show()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _exchange(self) -> None:
        """Wait for a fault on any rank, publish this rank's own fault, close, and wait for the other ranks."""
        from torch import distributed

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # `multi_tenant` shares the server with the process group's own store.
        connection = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, port, None, self._rank == 0, _CONNECT_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
        store = distributed.PrefixStore("biphasic", connection)  # pyright: ignore[reportPrivateImportUsage]
        store.set(f"pid of {self._rank}", str(os.getpid()))
        self.registered.set()
        while not self._wake.wait(_POLL_SECONDS):
            if self._next_has_ended(store):
                fault = _Fault(self._next, self._node, FAILED, _ENDED, lost=True)
                store.compare_set(_FIRST_FAULT, "", json.dumps(asdict(fault)))
            if store.check([_FIRST_FAULT]):
                self._first = _Fault(**json.loads(store.get(_FIRST_FAULT)))
                self._wake.wait(_GRACE_SECONDS)
                break
        with self._lock:
            if self._stopped:
                store.set(f"end of {self._rank}", "")
                return
            self._listener_ends_process = self._own is None
        if self._own is not None:
            store.set(f"text of {self._rank}", self._own.text)
            self._first = _Fault(**json.loads(store.compare_set(_FIRST_FAULT, "", json.dumps(asdict(self._own)))))
        assert self._first is not None
        self._first_known.set()
        if self._own is not None:
            self._closed.wait()
        else:
            timer = Timer(_CLOSE_SECONDS, os._exit, [self._first.status])
            timer.daemon = True
            timer.start()
            if self.close is not None:
                with suppress(Exception):
                    self.close(str(self._first))
        # A lost rank does not reach the barrier.
        count = self._count - self._first.lost
        _barrier(store, "closed", count)
        below = [f"text of {rank}" for rank in range(self._rank - self._local, self._rank)]
        texts = [store.get(key).decode() for key in below if store.check([key])]
        self._shown_by_lower_rank = self._own is not None and self._own.text in texts
        _barrier(store, "read", count if self._rank == 0 else 0)

    def _next_has_ended(self, store: Any) -> bool:
        """Return whether the next rank's process has ended without calling `stop`.

        With gloo, collectives of the other ranks then fail. With NCCL, the main threads keep waiting on the GPU, until the
        launcher kills them or NCCL's watchdog aborts them, and nobody would record why the job ended.
        """
        key = f"pid of {self._next}"
        has_ended = store.check([key]) and not os.path.exists(f"/proc/{store.get(key).decode()}")
        return has_ended and not store.check([f"end of {self._next}"])

    def _show(self) -> int:
        own, first = self._own, self._first or self._own
        assert first is not None
        is_message = isinstance(self._error, ConfigError | UserError)
        if own is not None and not self._shown_by_lower_rank and (is_message or own.text == first.text):
            if own.lost:
                print(own, file=sys.stderr)
            elif is_message:
                print(own.text, file=sys.stderr)
            else:
                traceback.print_exception(self._error)
        elif self._local:
            return 0
        elif first.node != self._node or first.text == _ENDED:
            print(f"{first}{f' (on node {first.node})' * (first.node != self._node)}", file=sys.stderr)
        return first.status


def _barrier(store: Any, name: str, count: int) -> None:
    store.add(name, 1)
    end = time.monotonic() + _CLOSE_SECONDS
    while store.add(name, 0) < count and time.monotonic() < end:
        time.sleep(0.05)


def _handle_sigterm(handler: Any) -> None:
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, handler)


_ranks: _Ranks | None = None
