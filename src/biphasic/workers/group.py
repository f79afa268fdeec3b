"""Keep a number of worker processes running, and call methods of an object that each of them has created."""

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from typing import Any

from biphasic.errors import UserError, first_line

_MAX_FAILED_STARTS = 3
"""Number of consecutive workers that may die while they start, before the group fails."""


class UnusableWorker(Exception):
    """A worker can't work where it was started, such as on a GPU that has failed, but others may."""


class Slot:
    """A worker and its job."""

    def __init__(self, executor: Executor, factory: Callable[..., Any], arguments: Any):
        self._executor, self.job, self.is_retired = executor, None, False
        self.pending: Future[Any] | None = self._submit(_create, factory, arguments)

    def give(self, job: Any, method: str, *arguments: Any) -> None:
        """Give the worker a job: a call of a method of its object."""
        self.job, self.pending = job, self._submit(_call, method, *arguments)

    def close(self) -> None:
        """End the worker."""
        self._executor.shutdown(wait=False)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._executor.submit(function, *arguments)
        except (BrokenExecutor, EOFError, OSError) as error:  # the worker or the fork server is dead
            time.sleep(1)  # the fork server is started again only after it has ended
            future: Future[Any] = Future()
            future.set_exception(BrokenExecutor(first_line(error)))
            return future


@dataclass(frozen=True)
class EndedJob:
    """A job, and the value or the error of its call."""

    job: Any
    value: Any = None
    error: BaseException | None = None
    lost: bool = False
    """Whether the worker died."""
    worker: int = 0
    """The worker's number."""


class WorkerGroup(ABC):
    """Workers that run one job at a time each. A worker that dies is replaced; one that is unusable is retired."""

    cpus: int
    gpus: int
    lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
    """The errors of a call whose worker died."""
    size: int
    """Number of workers."""
    slots: list[Slot]
    """The workers; none before the first `wait`."""

    @abstractmethod
    def start(self, number: int, cpus: int, gpu_share: float) -> Executor:
        """Start the worker with this number, from 0. A dead worker's replacement has the same number."""

    @abstractmethod
    def make_report(self) -> Callable[..., None]:
        """Return a function for workers, which can be pickled. It sends its arguments to this process."""

    @abstractmethod
    def take_reports(self) -> list[tuple[Any, ...]]:
        """Return the arguments that workers have sent since the last time."""

    @abstractmethod
    def close(self) -> None:
        """Kill all workers."""

    def store(self, arguments: tuple[Any, ...]) -> Any:
        """Store arguments that all workers need, and return what is sent to each worker instead."""
        return arguments

    def open(
        self, size: int, key: str, factory: Callable[..., Any], *arguments: Any, cpus: int = 1, gpu_share: float = 0.0
    ) -> None:
        """Describe `size` workers, which the first `wait` starts.

        Each calls `factory` with the arguments to create its object, and occupies `cpus` cores (of a cluster; processes
        of one machine share its cores) and a share of a GPU. `key` is the YAML's key for `size`, for an error message.
        """
        stored = self.store(arguments)
        self._slot: Callable[[int], Slot] = lambda number: Slot(self.start(number, cpus, gpu_share), factory, stored)
        self.size, self._key, self._failed_starts, self.slots = size, key, 0, []

    @property
    def running(self) -> list[Any]:
        """The jobs that are running."""
        return [slot.job for slot in self.slots if slot.job is not None]

    @property
    def idle(self) -> list[Slot]:
        """The workers that are ready and have no job."""
        return [slot for slot in self.slots if slot.pending is None and not slot.is_retired]

    def wait(self, seconds: float) -> list[EndedJob]:
        """Wait up to `seconds` until a job has ended or a worker has started, and return the jobs that ended.

        The first call can take longer, because it waits for the imports of this machine's workers. Raises a UserError
        if workers repeatedly die while they start or all are unusable, and any other error that a worker's `factory`
        raises.
        """
        self.slots = self.slots or [self._slot(number) for number in range(self.size)]
        numbers = {slot.pending: number for number, slot in enumerate(self.slots) if slot.pending is not None}
        if not numbers:
            time.sleep(seconds)
        calls = wait(numbers, seconds, FIRST_COMPLETED).done
        return [ended for call in calls if (ended := self._collect(numbers[call], call)) is not None]

    def replace(self, number: int) -> None:
        """Start another worker in place of one that has no job."""
        self.slots[number].close()
        self.slots[number] = self._slot(number)

    def _collect(self, number: int, call: Future[Any]) -> EndedJob | None:
        """Return the slot's ended job; None if the call was the worker's start."""
        slot, error = self.slots[number], call.exception()
        job, slot.job, slot.pending = slot.job, None, None
        if lost := isinstance(error, (BrokenExecutor, *self.lost)):
            self.slots[number] = self._slot(number)
        if job is not None:
            return EndedJob(job, None if error else call.result(), error, lost, number)
        if error is None:
            self._failed_starts = 0
            return None
        if isinstance(error, UnusableWorker):
            slot.close()
            slot.is_retired = True
            if all(other.is_retired for other in self.slots):
                raise UserError(f"no worker can be used: {error}")
            print(f"WARNING: a worker can't be used, and the others go on: {error}", flush=True)
            return None
        if not lost:
            raise error
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            advice = f"is there memory for {self.size} of them ({self._key})?"
            raise UserError(f"workers die while they start ({first_line(error)}): {advice}")
        return None


_object: Any = None
"""In a worker process, the object whose methods are called."""


def _create(factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _object
    _object = factory(*arguments)


def _call(method: str, *arguments: Any) -> Any:
    try:
        return getattr(_object, method)(*arguments)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            # The pool would take an error that can't be unpickled for the death of its process.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise
