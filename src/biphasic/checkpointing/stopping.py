"""Ending a run early, on all ranks after the same batch: a preemption, or a fault that one rank has found."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.checkpointing.together import Together
from biphasic.config.errors import UserError
from biphasic.data.loader_signals import keep_loaders, let_loaders_go

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_AGAIN = 3.0
"""Seconds. A signal to a whole process group comes twice: the launcher passes its own on at once."""


class Stopping(Callback):
    """Listens for SIGTERM and SIGUSR1, and has all ranks agree after each batch whether it was the last one.

    A first signal lets the batch finish; the saver then saves and stores it. A second one, three seconds later or more,
    ends the process at once with status 128 + its number. Loader processes ignore the signals, since the batch needs
    them, until the run closes.

    `asked` is None, or why the run stops; `broken` says that it stops for a fault, without another checkpoint.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.broken = False
        self.saved = False
        """All is stored: from here on signals change nothing."""
        self.since = 0.0
        self._here: tuple[int, str] = (0, "")
        self._ranks = Together()
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take the signals over from Composer, whose handler exits in the middle of a batch."""
        keep_loaders()
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def release(self) -> None:
        """Give the signals back."""
        let_loaders_go()
        if threading.current_thread() is not threading.main_thread():
            return  # the process is about to end
        for number, handler in self._before.items():
            # The launcher sends its signal to all that are left when the first process has ended.
            signal.signal(number, signal.SIG_IGN if self.saved else handler)
        self._before = {}

    def fault(self, why: str) -> None:
        """Have the run stop after this batch, without saving: any rank, any thread."""
        self._here = (2, why)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Agree."""
        self._agree()

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """A validation takes longer than most machines leave."""
        self._agree()

    def seconds(self) -> float:
        """Since the signal came to this rank, or since it was agreed on."""
        return time.monotonic() - self.since

    def unless_stopping(self, interval: Callable[..., bool]) -> Callable[..., bool]:
        """An interval of validations, none of which begins when the run stops."""

        def due(state: State, event: Any) -> bool:
            return self.asked is None and interval(state, event)

        return due

    def _agree(self) -> None:
        if self.asked is not None:
            return
        if not self._ranks.most(self._here[0]):
            return
        code, why = max(self._ranks.all_of(self._here), key=lambda one: one[0])
        self.asked, self.broken = why, code == 2
        self.since = self.since or time.monotonic()

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self._owner:
            return
        name = signal.Signals(number).name
        if not self._here[0]:
            self._here, self.since = (1, name), time.monotonic()
            print(f"rank {dist.get_global_rank()}: {name}: the run stops after this batch and saves; a second signal "
                  "ends it at once", flush=True)  # fmt: skip
        elif not self.saved and time.monotonic() - self.since > _AGAIN:
            print(f"rank {dist.get_global_rank()}: {name} again: ends at once", flush=True)
            os._exit(128 + number)

    def together(self) -> None:
        """Wait until all ranks are here."""
        self._ranks.meet()

    def require_sound(self) -> None:
        """End the run if it was agreed that something is broken.

        Raises:
            UserError: saying what.
        """
        if self.asked is not None and self.broken:
            raise UserError(self.asked)
