"""Stop a run early, on all ranks after the same batch, when it is preempted or one rank has a fault."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.checkpointing.rank_group import TIMEOUT, RankGroup
from biphasic.data.loader_signals import keep_loaders, release_loaders
from biphasic.errors import Preempted
from biphasic.processes import STOP_SIGNALS, ends_command

_REPEAT_SECONDS = 3.0
"""Seconds in which a repeated signal is ignored: one to a process group arrives twice, as the launcher forwards it."""
UPLOAD_TIMEOUT = timedelta(minutes=15)
"""How long a run waits at its end for uploads, e.g. if the bucket can't be reached."""
_CONTINUE, _PREEMPTED, _FAULT = range(3)


class StopCoordinator(Callback):
    """Callback that handles SIGTERM, SIGUSR1 and SIGHUP: after each batch, all ranks agree whether the run stops.

    After a first signal the run finishes the batch, saves and uploads a checkpoint, and stops. Before its first batch it
    stops without training that: a checkpoint of its state exists, or nothing was trained. A second signal more than
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
        self.ranks = RankGroup(TIMEOUT + UPLOAD_TIMEOUT)
        self._pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}
        self._has_begun = False
        """Whether a batch was loaded."""

    def install_handlers(self) -> None:
        """Replace Composer's signal handler, which exits in the middle of a batch."""
        keep_loaders()
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}

    def restore_handlers(self, ended: bool) -> None:
        """Restore the previous handlers. If the run has `ended` as it should, a signal doesn't end its command any more."""
        release_loaders()
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can set handlers, and the process is about to end
        for number, handler in self._previous_handlers.items():
            # The launcher signals all remaining processes once one has ended.
            signal.signal(number, signal.SIG_IGN if ended and ends_command(handler) else handler)
        self._previous_handlers = {}

    def stop_for_fault(self, reason: str) -> None:
        """Stop the run after this batch without saving. Any rank and any thread may call this."""
        self._request = (_FAULT, reason)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self.batch_end(state, logger)
        if self.reason is not None and not self.is_fault:
            self.saved = True
            batch = int(state.timestamp.batch)
            place = f"before batch {batch + 1:,}, the first of this start"
            raise Preempted(f"{self.reason}: stopped {place}, {self.seconds_since_request():.1f} s after the request")

    def batch_end(self, state: State, logger: Logger) -> None:
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
