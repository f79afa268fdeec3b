"""Keep a number of workers running, and give them jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from biphasic.errors import UserError
from biphasic.workers.engine import Call, Engine, Location, WorkerLostError, WorkerProcess

_MAX_FAILED_STARTS = 3
"""Number of consecutive workers that may die while they start, before the group fails."""

Job = TypeVar("Job")


class Slot(Generic[Job]):
    """A worker and its job."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.location: Location | None = None
        """None until the worker is ready."""
        self.job: Job | None = None
        self.pending: Call | None = process.started

    def give(self, job: Job, method: str, *arguments: Any) -> None:
        """Give the worker a job: a call of one of its methods."""
        self.job, self.pending = job, self.process.call(method, *arguments)


@dataclass(frozen=True)
class EndedJob(Generic[Job]):
    """A job, and the value or the error of its call."""

    job: Job
    value: Any = None
    error: Exception | None = None


class WorkerGroup(Generic[Job]):
    """Workers that run one job at a time each. A worker that dies is replaced.

    Args:
        engine: the workers' engine.
        start: starts a worker with the engine.
        size: number of workers.
        key: the key of the YAML with the number of workers, for an error message.
    """

    def __init__(self, engine: Engine, start: Callable[[], WorkerProcess], size: int, key: str):
        self._engine, self._start, self._key = engine, start, key
        self._failed_starts = 0
        self.slots: list[Slot[Job]] = [Slot(start()) for _ in range(size)]

    @property
    def running(self) -> list[Job]:
        """The jobs that are running."""
        return [slot.job for slot in self.slots if slot.job is not None]

    @property
    def idle(self) -> list[Slot[Job]]:
        """The workers that are ready and have no job."""
        return [slot for slot in self.slots if slot.location is not None and slot.pending is None]

    def wait(self, seconds: float) -> list[EndedJob[Job]]:
        """Wait up to `seconds` until a job has ended or a worker has started, and return the jobs that ended.

        Raises:
            UserError: workers repeatedly die while they start.
            Exception: a worker's object can't be created.
        """
        slots = {slot.pending: slot for slot in self.slots if slot.pending is not None}
        if not slots:
            time.sleep(seconds)
            return []
        ended = self._engine.wait(slots, seconds)
        return [job for call in ended if (job := self._collect(slots[call], call)) is not None]

    def _collect(self, slot: Slot[Job], call: Call) -> EndedJob[Job] | None:
        """Return the slot's job; None if the call was the worker's start."""
        job, slot.job, slot.pending = slot.job, None, None
        try:
            value = call.result()
        except WorkerLostError as error:
            self.slots[self.slots.index(slot)] = Slot(self._start())
            if job is not None:
                return EndedJob(job, error=error)
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                advice = f"is there memory for {len(self.slots)} of them ({self._key})?"
                raise UserError(f"workers die while they start ({error}): {advice}") from None
            return None
        except Exception as error:
            if job is None:
                raise
            return EndedJob(job, error=error)
        if job is not None:
            return EndedJob(job, value)
        self._failed_starts, slot.location = 0, value
        return None
