"""The process from which local workers are forked, after it has imported what they need.

Its imports happen once, and workers share their memory. `multiprocessing` has a fork server too, which is not used: a
program has only one, with the environment of its first use, but OMP_NUM_THREADS has to be set before PyTorch is imported; it
runs until its last worker ends, so workers would outlive a killed program; its workers import the program's main module; and
Ctrl-C during its imports prints a traceback.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from biphasic.workers.parent import die_with_parent


def serve(control_handle: int, modules: list[str]) -> NoReturn:
    """Import modules, then fork a worker for each request until the process at the other end of the socket ends.

    A request is `start NUMBER`, with the worker's end of its pipe, or `end NUMBER`, whose answer is how that worker ended.
    """
    for module in modules:
        _import(module)
    gc.collect()
    # Garbage collection in a worker would otherwise write to the memory that workers share, and so copy it.
    gc.freeze()
    control, server = socket.socket(fileno=control_handle), os.getpid()
    started: dict[bytes, int | str] = {}
    while True:
        request, handles, _, _ = socket.recv_fds(control, 64, 1)
        if not request:
            os._exit(0)
        command, number = request.split()
        if command == b"end":
            control.send(_how_it_ended(started.pop(number)).encode())
            continue
        try:
            started[number] = os.fork()
        except OSError as error:
            started[number] = f"it can't be forked: {error.strerror}"
        if started[number] == 0:
            control.close()
            _run_worker(Connection(handles[0]), server)
        os.close(handles[0])


def _import(name: str) -> None:
    """Import a module, and those in its `WORKER_IMPORTS`, which its functions import only when they are called."""
    # A worker that needs the module raises the error again, in a call whose caller sees it.
    with suppress(Exception):
        for other in getattr(import_module(name), "WORKER_IMPORTS", ()):
            import_module(other)


def _how_it_ended(started: int | str) -> str:
    if isinstance(started, str):
        return started
    _, status = os.waitpid(started, 0)
    return str(os.waitstatus_to_exitcode(status))


def _run_worker(connection: Connection, server: int) -> NoReturn:
    try:
        die_with_parent(server)
        with suppress(OSError):
            # If memory runs out, the kernel kills a worker, which is replaced, and not the process that started it.
            Path("/proc/self/oom_score_adj").write_text("1000")
        connection.send_bytes(pickle.dumps(os.getpid()))
        _answer_calls(connection)
    finally:
        os._exit(1)


def _answer_calls(connection: Connection) -> NoReturn:
    """Create the worker's object and call its methods, as the messages from the pipe say."""
    environment, reports = pickle.loads(connection.recv_bytes())
    os.environ.update(environment)
    target: Any = None
    while True:
        message = connection.recv_bytes()
        try:
            function, arguments = pickle.loads(message)
            if isinstance(function, str):
                value = getattr(target, function)(*arguments)
            else:
                report = {"report": partial(_report, connection)} if reports else {}
                value, target = None, function(*arguments, **report)
            answer = pickle.dumps(("value", value))
        except Exception as error:
            answer = pickle.dumps(("error", (_as_picklable(error), traceback.format_exc())))
        connection.send_bytes(answer)


def _report(connection: Connection, *values: Any) -> None:
    connection.send_bytes(pickle.dumps(("report", values)))


def _as_picklable(error: Exception) -> Exception:
    """Return the exception, or one with its message if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
