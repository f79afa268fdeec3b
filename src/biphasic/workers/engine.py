"""The interface to worker processes. `local` implements it with processes of this machine, `ray` with a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class WorkerLostError(Exception):
    """A worker died before its call ended."""

    def __init__(self, reason: str, out_of_memory: bool = False):
        super().__init__(reason)
        self.out_of_memory = out_of_memory

    @property
    def end(self) -> str:
        """Return how the worker ended, as the end of a sentence."""
        return "ran out of memory" if self.out_of_memory else "died"


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as text: the `__cause__` of that exception in this process."""


@dataclass(frozen=True)
class Location:
    """A worker's node and its GPUs on that node."""

    node: str
    gpus: tuple[str, ...] = ()


class Call(Protocol):
    """A call of a worker's method."""

    def result(self) -> Any:
        """Return the method's value. `Engine.wait` must have returned the call.

        Raises:
            WorkerLostError: the worker died.
            Exception: the method's own exception.
        """


class WorkerProcess(Protocol):
    """A worker process, which runs one call at a time."""

    @property
    def started(self) -> Call:
        """The call that creates the worker's object. Its value is the worker's `Location`."""
        ...

    def call(self, method: str, *arguments: Any) -> Call:
        """Call a method of the worker's object."""
        ...


class Engine(Protocol):
    """Starts worker processes and waits for their calls."""

    @property
    def cpus(self) -> int:
        """Number of cores for workers."""
        ...

    @property
    def gpus(self) -> int:
        """Number of GPUs for workers."""
        ...

    def smallest_gpu_bytes(self) -> int | None:
        """Return the memory of the smallest GPU of a node, in bytes; None if it is unknown or there is no GPU."""
        ...

    def start(
        self, factory: Callable[..., Any], *arguments: Any, cpus: int = 1, gpu_share: float = 0.0
    ) -> WorkerProcess:
        """Start a worker process. This does not wait for it.

        Args:
            factory: called in the worker to create its object; also with `report=` if the engine was opened with `report`.
            arguments: arguments of `factory`.
            cpus: number of cores that the worker occupies.
            gpu_share: share of a GPU that the worker occupies. Zero: the worker is given no GPU.
        """
        ...

    def wait(self, calls: Iterable[Call], seconds: float) -> list[Call]:
        """Wait up to `seconds` for one of the calls to end, and return those that have ended."""
        ...
