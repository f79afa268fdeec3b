"""An object for worker processes, and what every group of workers does with it."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphasic.workers.group import EndedJob, WorkerGroup

AT_IMPORT = {"process": os.getpid(), "OF_WORKERS": os.environ.get("OF_WORKERS")}


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
        return {"process": os.getpid(), "parent": os.getppid(), "environment": dict(os.environ), "at import": AT_IMPORT}

    def meet(self, folder: str, others: int) -> None:
        """Return once this many workers are here."""
        (Path(folder) / str(os.getpid())).touch()
        while len(list(Path(folder).iterdir())) < others:
            time.sleep(0.01)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def size(self, content: bytes) -> int:
        return len(content)


def die_at_once(*_: Any) -> None:
    os._exit(3)


def run_all(group: WorkerGroup, *calls: tuple[Any, ...]) -> list[EndedJob]:
    """Run calls, each a method and its arguments; returns how they ended, in the order of the calls."""
    waiting, ended = deque(enumerate(calls)), list[EndedJob]()
    end = time.monotonic() + 60
    while len(ended) < len(calls):
        assert time.monotonic() < end
        for slot in group.idle[: len(waiting)]:
            number, call = waiting.popleft()
            slot.give(number, *call)
        ended += group.wait(0.5)
    return sorted(ended, key=lambda ended: ended.job)


def result(group: WorkerGroup, method: str, *arguments: Any) -> Any:
    """Call a method; returns its value or raises its error."""
    [ended] = run_all(group, (method, *arguments))
    if ended.error is not None:
        raise ended.error
    return ended.value


def check_group(group: WorkerGroup, folder: Path) -> None:
    """What every group does."""
    group.open(2, "cluster.workers", Total, 10, group.make_report())
    # Two objects in two processes, with the environment of workers.
    processes = both_workers(group, folder / "first")
    assert len({os.getpid(), *processes}) == 3
    assert sum(ended.value for ended in run_all(group, *[("add", number) for number in range(1, 5)])) >= 20 + 10
    assert result(group, "about")["environment"]["OF_WORKERS"] == "yes"
    reports, end = list[tuple[int, int]](), time.monotonic() + 20
    while len(reports) < 4 and time.monotonic() < end:
        reports += group.take_reports()
    assert sorted(number for number, _ in reports) == [1, 2, 3, 4]
    assert result(group, "size", bytes(10**7)) == 10**7
    # A failed call does not end the worker, and a dead worker is replaced.
    with pytest.raises(KeyError, match="no such number"):
        result(group, "fail")
    [ended] = run_all(group, ("exit", -signal.SIGKILL))
    assert ended.lost and not group.running
    abouts = [ended.value for ended in run_all(group, *[("about",)] * 20)]
    assert len({about["process"] for about in abouts} - processes) <= 1
    again = both_workers(group, folder / "again")
    assert len(again & processes) == 1
    # A worker that is replaced gives its cores to the new one.
    group.replace(0)
    assert len(both_workers(group, folder / "replaced") & again) == 1


def both_workers(group: WorkerGroup, folder: Path) -> set[int]:
    """The processes of a group of two, which work at the same time."""
    folder.mkdir()
    run_all(group, *[("meet", str(folder), 2)] * 2)
    return {int(file.name) for file in folder.iterdir()}


def processes_with(variable: str) -> list[int]:
    """The processes whose environment, as they were started, contains this text."""

    def has_it(process: Path) -> bool:
        try:
            return variable.encode() in (process / "environ").read_bytes()
        except OSError:
            return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if has_it(process)]
