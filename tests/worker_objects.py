"""An object for worker processes, and what every engine does with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphasic.workers.engine import Call, Engine, RemoteTraceback, WorkerLostError

WORKER_IMPORTS = ("this",)
AT_IMPORT = os.environ.get("OF_WORKERS")


class Unpicklable(Exception):
    def __init__(self, first: str, second: str):
        super().__init__(first + second)


class Total:
    """A sum in a worker."""

    def __init__(self, start: int, report: Callable[..., None] | None = None):
        if start < 0:
            raise ValueError(f"a negative start: {start}")
        self.value, self._report = start, report

    def add(self, number: int) -> int:
        self.value += number
        if self._report is not None:
            self._report(number, self.value)
        return self.value

    def fail(self, picklable: bool = True) -> None:
        raise KeyError("no such number") if picklable else Unpicklable("two", "arguments")

    def function(self) -> Any:
        """A value that can't be pickled."""
        return lambda: None

    def exit(self, status: int, keep_pipe: bool = False) -> None:
        """Exit; a negative status is a signal. A process that keeps the pipe open may stay behind."""
        if keep_pipe and os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    def about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "environment": dict(os.environ),
            "at import": AT_IMPORT,
            "imported": "this" in sys.modules,
        }

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def size(self, content: bytes) -> int:
        return len(content)


def die_at_once(*_: Any, **__: Any) -> None:
    os._exit(3)


def result(engine: Engine, call: Call) -> Any:
    """Wait for a call, and return its value or raise its error."""
    end = time.monotonic() + 60
    while not engine.wait([call], 0.5):
        assert time.monotonic() < end
    return call.result()


def check_engine(engine: Engine, reports: list[tuple[int, int]]) -> None:
    """What both engines do. `reports` is where the engine's `report` adds them."""
    first, second = engine.start(Total, 10), engine.start(Total, 20)
    locations = [result(engine, worker.started) for worker in (first, second)]
    assert all(location.node and location.gpus == () for location in locations)
    # Each worker has its own object, in a process of its own.
    assert [result(engine, first.call("add", 1)), result(engine, first.call("add", 2))] == [11, 13]
    assert result(engine, second.call("add", 5)) == 25
    abouts = [result(engine, worker.call("about")) for worker in (first, second)]
    assert len({os.getpid(), *(about["pid"] for about in abouts)}) == 3
    assert {about["environment"]["OF_WORKERS"] for about in abouts} == {"yes"}
    end = time.monotonic() + 20
    while len(reports) < 3 and time.monotonic() < end:
        result(engine, first.call("size", b""))
    assert sorted(reports) == [(1, 11), (2, 13), (5, 25)]
    assert result(engine, first.call("size", bytes(10**7))) == 10**7
    # A failed call does not end the worker.
    with pytest.raises(KeyError, match="no such number") as error:
        result(engine, first.call("fail"))
    assert isinstance(error.value.__cause__, RemoteTraceback) and "in fail" in str(error.value.__cause__)
    assert result(engine, first.call("add", 1)) == 14
    # Both workers work at the same time, and `wait` returns the call that has ended.
    waiting = [worker.call("add", 1) for worker in (first, second)]
    assert engine.wait(waiting, 30)
    assert {result(engine, call) for call in waiting} == {15, 26}
    with pytest.raises(WorkerLostError) as lost:
        result(engine, second.call("exit", -signal.SIGKILL))
    assert not lost.value.out_of_memory and lost.value.end == "died"
    # On the core that the dead worker occupied.
    failed = engine.start(Total, -1)
    with pytest.raises(ValueError, match="a negative start: -1"):
        result(engine, failed.started)
    assert result(engine, first.call("add", 1)) == 16


def processes_with(variable: str) -> list[int]:
    """The processes whose environment, as they were started, contains this text."""

    def has_it(process: Path) -> bool:
        try:
            return variable.encode() in (process / "environ").read_bytes()
        except OSError:
            return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if has_it(process)]
