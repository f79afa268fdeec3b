"""How long training waits for its data."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

_log = logging.getLogger(__name__)


@dataclass
class _Spent:
    """Seconds in steps, and of them waiting for the batch."""

    batches: int = 0
    waiting: float = 0.0
    steps: float = 0.0
    tokens: int = 0

    def add(self, waiting: float, step: float, tokens: int) -> None:
        self.batches += 1
        self.waiting += waiting
        self.steps += step
        self.tokens += tokens

    @property
    def share(self) -> float:
        return self.waiting / self.steps if self.steps else 0.0


class LoaderMeter(Callback):
    """Logs how long each step waits for its batch, and warns when that is a noticeable part of the training time.

    Logged: with each batch `data/wait_seconds`; over each window of batches `data/wait_share`, of the steps' time, and
    `data/tokens_per_second`, real tokens of all ranks over wall time, validation and checkpoints included; at the end of
    the training `data/wait_share_total`. A rank also waits for the slowest of the others, so the first rank's numbers
    speak for all.

    A step lasts from asking for a batch to the end of its training. The first one of an attempt is left out of the
    shares: it waits for the loader's processes to start. Nothing is kept in checkpoints.

    Args:
        window: batches between two shares.
        too_long: share above which a window's end warns.
    """

    def __init__(self, window: int = 50, too_long: float = 0.1):
        self.window = window
        self.too_long = too_long
        self._begin()

    def _begin(self) -> None:
        self._total = _Spent()
        self._recent = _Spent()
        self._asked = 0.0
        self._waiting = 0.0
        self._since: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin anew."""
        self._begin()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The loop asks for a batch."""
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """It is there."""
        self._waiting = time.perf_counter() - self._asked
        logger.log_metrics({"data/wait_seconds": self._waiting})

    def batch_end(self, state: State, logger: Logger) -> None:
        """It is trained on."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
            return
        before = state.previous_timestamp
        tokens = state.timestamp.token.value - (before.token.value if before is not None else 0)
        for spent in (self._recent, self._total):
            spent.add(self._waiting, now - self._asked, tokens)
        if self._recent.batches < self.window:
            return
        speed = self._recent.tokens / max(now - self._since, 1e-9)
        logger.log_metrics({"data/wait_share": self._recent.share, "data/tokens_per_second": speed})
        if self._recent.share > self.too_long and dist.get_global_rank() == 0:
            _log.warning(
                "the run waits for data: %.0f%% of the last %d steps' time; raise data.num_workers or data.predownload, "
                "or give it a larger data.cache_limit or a faster way to its shards",
                100 * self._recent.share,
                self.window,
            )
        self._recent, self._since = _Spent(), now

    def fit_end(self, state: State, logger: Logger) -> None:
        """Say it for the whole training."""
        if not self._total.batches:
            return
        logger.log_metrics({"data/wait_share_total": self._total.share})
        if dist.get_global_rank() == 0:
            print(f"waited for data: {100 * self._total.share:.1f}% of the training steps' time")
