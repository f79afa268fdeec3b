"""Workers as processes of this machine."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from biphasic.workers.engine import Call, Location, RemoteTraceback, WorkerLostError
from biphasic.workers.resources import available_cores, smallest_gpu_bytes, visible_gpus

_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from biphasic.workers.fork_server import serve
serve(int(sys.argv[2]), sys.argv[3:])
"""
_END_SECONDS = 10.0


class LocalEngine:
    """Starts workers on this machine, forked from a process that has imported what they need.

    The workers die at once if this process dies. They are not in its process group, so Ctrl-C in a terminal reaches this
    process alone. What they print is discarded.

    Args:
        environment: environment variables of the workers, in addition to this process's variables.
        modules: modules to import once for all workers, and those in their `WORKER_IMPORTS`.
        report: called in this process, during `wait`, with the arguments that a worker passes to its own `report`.
    """

    def __init__(
        self, environment: dict[str, str], modules: Sequence[str] = (), report: Callable[..., None] | None = None
    ):
        self.cpus = available_cores()
        self._gpus = visible_gpus()
        # A CUDA context of the fork server would make CUDA unusable in its forks. With this variable, PyTorch tells
        # whether there is a GPU without creating one.
        self._environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment}
        self._modules, self.report = list(modules), report
        self._server: _ForkServer | None = None
        self._workers: list[_LocalWorker] = []
        self._oom_kills = _count_oom_kills()

    @property
    def gpus(self) -> int:
        """Number of GPUs that this process may use."""
        return len(self._gpus)

    def smallest_gpu_bytes(self) -> int | None:
        """Return the memory of the smallest GPU in bytes."""
        return smallest_gpu_bytes()

    def start(
        self, factory: Callable[..., Any], *arguments: Any, cpus: int = 1, gpu_share: float = 0.0
    ) -> _LocalWorker:
        """Start a worker process. See `Engine.start`; processes of one machine share its cores whatever `cpus` says."""
        gpus = (self._least_loaded_gpu(),) if gpu_share else ()
        if self._server is None or not self._server.is_running():
            self._server = _ForkServer(self._environment, self._modules)
        worker = _LocalWorker(self, self._server, gpus, gpu_share)
        self._workers.append(worker)
        worker.create(factory, arguments)
        return worker

    def wait(self, calls: Iterable[Call], seconds: float) -> list[Call]:
        """Wait up to `seconds` for one of the calls to end, and return those that have ended."""
        local, end = cast(list[_LocalCall], list(calls)), time.monotonic() + seconds
        while True:
            ended = [call for call in local if call.outcome is not None]
            left = end - time.monotonic()
            if ended or left < 0:
                return list[Call](ended)
            ready = set(wait([handle for call in local for handle in call.worker.handles], left))
            for call in local:
                if not ready.isdisjoint(call.worker.handles):
                    call.worker.read()

    def close(self) -> None:
        """Kill all workers, and wait until they have ended."""
        if self._server is not None:
            # The kernel kills the workers of a server that dies.
            self._server.kill()
        for worker in self._workers.copy():
            worker.kill()

    def forget(self, worker: _LocalWorker) -> None:
        """Give back a dead worker's share of its GPU."""
        with suppress(ValueError):
            self._workers.remove(worker)

    def lost(self, ended: str) -> WorkerLostError:
        """Return the error for a worker that ended unexpectedly, with this exit code, or reason if there is no exit code."""
        kills = _count_oom_kills()
        out_of_memory = ended == str(-signal.SIGKILL) and kills > self._oom_kills
        # Of the counted kills, one was this worker's.
        self._oom_kills = self._oom_kills + 1 if out_of_memory else kills
        if not ended.lstrip("-").isdigit():
            return WorkerLostError(ended)
        code = int(ended)
        reason = f"exit status {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
        return WorkerLostError(reason, out_of_memory)

    def _least_loaded_gpu(self) -> str:
        load = {gpu: sum(worker.gpu_share for worker in self._workers if gpu in worker.gpus) for gpu in self._gpus}
        return min(load, key=lambda gpu: load[gpu])


class _LocalCall:
    """A call whose outcome the worker's messages set."""

    def __init__(self, worker: _LocalWorker):
        self.worker = worker
        self.outcome: tuple[Any, Exception | None] | None = None

    def result(self) -> Any:
        assert self.outcome is not None
        value, error = self.outcome
        if error is not None:
            raise error
        return value


class _LocalWorker:
    """A worker process, at the other end of a pipe.

    Args:
        engine: the worker's engine.
        server: the process that forks the worker.
        gpus: names of the worker's GPUs; if there are none, it sees the GPUs that this process sees.
        gpu_share: share of its GPU that it occupies.
    """

    def __init__(self, engine: LocalEngine, server: _ForkServer, gpus: tuple[str, ...], gpu_share: float):
        self.gpus, self.gpu_share = gpus, gpu_share
        self._engine, self._server = engine, server
        self._connection, other_end = Pipe()
        self._number = server.fork(other_end.fileno())
        other_end.close()
        self._process: int | None = None
        """File descriptor of the process, which becomes readable when it ends; None until it has sent its process id."""
        self.started = _LocalCall(self)
        self._pending = deque([self.started])
        """Calls without an outcome, in the order in which the worker answers them."""

    @property
    def handles(self) -> list[Any]:
        """What becomes ready when there is a message or the process ends."""
        return [self._connection] if self._process is None else [self._connection, self._process]

    def create(self, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Let the worker create its object."""
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        self._send((environment, self._engine.report is not None))
        self._send((factory, arguments))

    def call(self, method: str, *arguments: Any) -> _LocalCall:
        """Call a method of the worker's object."""
        call = _LocalCall(self)
        self._pending.append(call)
        self._send((method, arguments))
        return call

    def read(self) -> None:
        """Read the messages that have arrived."""
        try:
            # The end of the pipe is not enough: processes that the worker has forked keep it open.
            has_ended = self._process is not None and bool(wait([self._process], 0))
            while self._pending and self._connection.poll():
                self._take(pickle.loads(self._connection.recv_bytes()))
            if self._pending and has_ended:
                raise EOFError
        except (EOFError, OSError):
            self.kill()
            error = self._engine.lost(self._server.how_it_ended(self._number))
            while self._pending:
                self._pending.popleft().outcome = None, error

    def kill(self) -> None:
        """Kill the process, and wait until it has ended, if it has sent its process id."""
        self._engine.forget(self)
        # A worker that has not yet sent its process id ends when it reads from the closed pipe.
        self._connection.close()
        if self._process is not None:
            # The process has died with its server, and init has reaped it already.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            wait([self._process], _END_SECONDS)
            os.close(self._process)
            self._process = None

    def _take(self, message: Any) -> None:
        if isinstance(message, int):
            self._process = os.pidfd_open(message)
            return
        kind, content = message
        if kind == "report":
            assert self._engine.report is not None
            self._engine.report(*content)
        elif kind == "error":
            error, trace = content
            error.__cause__ = RemoteTraceback(trace)
            self._pending.popleft().outcome = None, error
        else:
            call = self._pending.popleft()
            value = Location(socket.gethostname(), self.gpus) if call is self.started else content
            call.outcome = value, None

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)
        # If the worker is dead, `read` notices it.
        with suppress(OSError):
            self._connection.send_bytes(content)


class _ForkServer:
    """The process from which workers are forked. See `biphasic.workers.fork_server`."""

    def __init__(self, environment: dict[str, str], modules: list[str]):
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count()
        handle = other_end.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(sys.path), str(handle), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            pass_fds=[handle],
            start_new_session=True,
        )
        other_end.close()

    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def fork(self, handle: int) -> int:
        """Ask for a worker with this file descriptor as its end of a pipe, and return the worker's number."""
        number = next(self._numbers)
        # If the process is dead, the worker's pipe is closed.
        with suppress(OSError):
            socket.send_fds(self._control, [b"start %d" % number], [handle])
        return number

    def how_it_ended(self, number: int) -> str:
        """Return a dead worker's exit code, or a reason if there is none. A worker that still runs is waited for."""
        with suppress(OSError):
            self._control.send(b"end %d" % number)
            if answer := self._control.recv(1024):
                return answer.decode()
        return "the process that forks workers died"

    def kill(self) -> None:
        """Kill the process, and so its workers."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed on this machine because memory ran out."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
