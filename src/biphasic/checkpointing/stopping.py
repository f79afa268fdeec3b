"""Stop a run early, on all ranks after the same batch, when it is preempted or one rank has a fault."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.data.loader_signals import keep_loaders, release_loaders
from biphasic.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_REPEAT_SECONDS = 3.0
"""Seconds in which a repeated signal is ignored: one to a process group arrives twice, as the launcher forwards it."""
_TIMEOUT = timedelta(minutes=30)
UPLOAD_TIMEOUT = timedelta(minutes=15)
"""How long a run waits at its end for uploads, e.g. if the bucket can't be reached."""
T = TypeVar("T")
_CONTINUE, _PREEMPTED, _FAULT = range(3)


class RankGroup:
    """A gloo process group of all ranks for collectives on CPU tensors, separate from the training's process group.

    A rank may wait for the others longer than in training (`timeout`), because one may be downloading a checkpoint.
    `is_first` says whether this is rank 0, and `local_ranks` are the ranks of this node.
    """

    def __init__(self, timeout: timedelta = _TIMEOUT):
        self.rank, self.local_rank, self.size = dist.get_global_rank(), dist.get_local_rank(), dist.get_world_size()
        self.is_first, self.node, first = self.rank == 0, dist.get_node_rank(), self.rank - self.local_rank
        self.local_ranks = range(first, first + dist.get_local_world_size())
        self.group: Any = torch.distributed.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None
        """None for a single process."""

    def maximum(self, value: int) -> int:
        """Return the maximum of all ranks' values."""
        if self.group is None:
            return value
        maximum = torch.tensor([value], dtype=torch.int32)
        torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(maximum.item())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        if self.group is None:
            return value
        # Not `all_gather`: a manifest lists a file for each rank, so memory would grow with the square of the ranks.
        values: list[Any] = [value if self.is_first else None]
        torch.distributed.broadcast_object_list(values, src=0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def raise_first(self, fault: UserError | None) -> None:
        """Raise the fault of the lowest rank that has one, on all ranks."""
        for first in self.all_gather(fault):
            if first is not None:
                raise first

    def on_all_ranks(self, action: Callable[[], object]) -> None:
        """Run a function. A UserError on any rank is raised on all of them."""
        fault = None
        try:
            action()
        except UserError as error:
            fault = error
        self.raise_first(fault)

    def once_per_machine(self, action: Callable[[], object]) -> None:
        """Run a function on local rank 0 of each node while all ranks wait. A UserError on any node is raised on all."""
        self.on_all_ranks(action if self.local_rank == 0 else lambda: None)

    def on_first_rank(self, action: Callable[[], T]) -> T:
        """Run a function on rank 0 while all ranks wait. Return its value, or raise its UserError, on all ranks."""
        values = list[T]()
        self.on_all_ranks(lambda: values.append(action()) if self.is_first else None)
        return self.broadcast(values[0] if values else None)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.maximum(0)


class StopCoordinator(Callback):
    """Callback that handles SIGTERM and SIGUSR1: after each batch, all ranks agree whether the run stops.

    After a first signal the run finishes the batch, saves and uploads a checkpoint, and stops. A second signal more than
    three seconds later ends the process at once with status 128 + signal number. Data loader processes ignore the signals
    until the run closes, because they may still be needed to finish the batch.

    Attributes:
        reason: why the run stops; None while it doesn't.
        is_fault: whether the run stops because of a fault, without saving.
        saved: whether the checkpoint was saved before stopping; further signals are then ignored.
        ranks: process group in which the ranks agree.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_fault = False
        self.saved = False
        self._request = (_CONTINUE, "")
        self._requested_at = 0.0
        self._signalled_at: float | None = None
        """When this rank received its first signal; None before."""
        self.ranks = RankGroup(_TIMEOUT + UPLOAD_TIMEOUT)
        self._pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}

    def install_handlers(self) -> None:
        """Replace Composer's signal handler, which exits in the middle of a batch."""
        keep_loaders()
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def restore_handlers(self) -> None:
        """Restore the signal handlers that were installed before."""
        release_loaders()
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can set handlers, and the process is about to end
        for number, handler in self._previous_handlers.items():
            # The launcher signals all remaining processes once one has ended.
            signal.signal(number, signal.SIG_IGN if self.saved else handler)
        self._previous_handlers = {}

    def stop_for_fault(self, reason: str) -> None:
        """Stop the run after this batch without saving. Any rank and any thread may call this."""
        self._request = (_FAULT, reason)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Agree with the other ranks whether to stop."""
        if self.reason is not None or not self.ranks.maximum(self._request[0]):
            return
        code, self.reason = max(self.ranks.all_gather(self._request), key=lambda request: request[0])
        self.is_fault = code == _FAULT
        self._requested_at = self._requested_at or time.monotonic()

    eval_batch_end = batch_end  # a validation may take longer than the notice before a preemption

    def seconds_since_request(self) -> float:
        """Return the seconds since this rank received a signal, or else since the ranks agreed to stop."""
        return time.monotonic() - self._requested_at

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:
            return
        name = signal.Signals(number).name
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            end = "without saving, because of a fault"
            if self._request[0] != _FAULT:
                self._request, self._requested_at = (_PREEMPTED, name), self._requested_at or self._signalled_at
                end = "and saves"
            message = f"the run stops after this batch {end}; a second signal ends it at once"
            print(f"rank {self.ranks.rank}: {name}: {message}", flush=True)
        elif not self.saved and time.monotonic() - self._signalled_at > _REPEAT_SECONDS:
            print(f"rank {self.ranks.rank}: {name} again: ends at once", flush=True)
            os._exit(128 + number)
