"""Measure training throughput, model FLOPs utilization (MFU), memory, and the time spent waiting for data."""

import itertools
import logging
import resource
import time
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.amounts import format_bytes
from biphasic.devices import peak_flops
from biphasic.model.architecture import Architecture
from biphasic.objectives.batch import step_of
from biphasic.ranks import is_first_rank

_log = logging.getLogger(__name__)
_PERCENTILES = (50, 90, 99)
_WINDOW, _MAX_WAIT_SHARE = 50, 0.1
_Step = tuple[float, float, float, float]
"""A step's seconds, the seconds that it waited for data, its tokens and FLOPs."""


def _rates(steps: list[_Step], peak: float | None) -> dict[str, float]:
    """Return tokens/s of all ranks, FLOP/s of one rank, and MFU if the device's `peak` FLOP/s is known."""
    seconds, _, tokens, flops = np.sum(steps, axis=0).tolist()
    rates = {"tokens_per_second": tokens / seconds, "flops_per_second": flops / seconds}
    if peak is not None:
        rates["mfu"] = flops / seconds / peak
    return rates


def _waiting_share(steps: list[_Step]) -> float:
    seconds, waiting, *_ = np.sum(steps, axis=0).tolist()
    return waiting / seconds


class Meters(Callback):
    """Callback that logs step durations, tokens and FLOPs per second, and how long steps wait for their batch.

    A step lasts from the request for a batch to the end of its training; validation and checkpoints are between steps.
    Tokens are counted over all ranks, without padding, and FLOPs for one rank. MFU divides `Architecture.flops` by the
    device's dense peak for `precision`; it is missing if the peak is unknown, as on CPUs.

    Each batch has `time/step_seconds` and `data/wait_seconds`; every 50 batches have `data/wait_share` (with a warning above
    10%), `throughput/…` and `memory/peak_bytes`; the end has each objective's totals (`throughput/clm/mfu`,
    `time/clm/step_seconds_p50`, `_p90`, `_p99`), which are printed too. The first step after a start is left out, because
    it waits for loader processes and compilation. Every rank waits for the slowest one, so rank 0's numbers hold for all.
    """

    def __init__(self, size: Architecture, precision: torch.dtype):
        self.size, gpu = size, torch.cuda.is_available()
        self.peak = peak_flops(torch.cuda.get_device_name(), precision) if gpu else None
        self._steps: dict[str, list[_Step]] = {}
        """All steps by objective."""
        self._window: list[_Step] = []
        self._step_start = self._waiting = 0.0
        self._flops = 0.0
        self._first_step_done = False

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._step_start = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._waiting = time.perf_counter() - self._step_start
        logger.log_metrics({"data/wait_seconds": self._waiting})

    def after_train_batch(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        step = step_of(batch)
        # The gradient norm has just synchronized host and device, so reading targets is free.
        targets = float(step.mean_targets_per_rank)
        document_lengths = [length for lengths in batch["lengths"] for length in lengths]
        self._flops = self.size.flops(document_lengths, step.causal, targets)

    def batch_end(self, state: State, logger: Logger) -> None:
        seconds = time.perf_counter() - self._step_start
        if not self._first_step_done:
            self._first_step_done = True
            return
        batch: Any = state.batch
        previous = state.previous_timestamp
        tokens = state.timestamp.token.value - (previous.token.value if previous is not None else 0)
        logger.log_metrics({"time/step_seconds": seconds})
        for steps in (self._window, self._steps.setdefault(step_of(batch).objective.name, [])):
            steps.append((seconds, self._waiting, tokens, self._flops))
        if len(self._window) == _WINDOW:
            self._end_window(logger)

    def _end_window(self, logger: Logger) -> None:
        share = _waiting_share(self._window)
        rates = {f"throughput/{name}": value for name, value in _rates(self._window, self.peak).items()}
        logger.log_metrics({"data/wait_share": share, "memory/peak_bytes": peak_memory(), **rates})
        if share > _MAX_WAIT_SHARE and is_first_rank():
            advice = "raise data.num_workers or data.predownload, or use a larger data.cache_limit or a faster connection"
            message = "the run waits for data: %.0f%% of the last %d steps' time; %s to the shards"
            _log.warning(message, 100 * share, _WINDOW, advice)
        self._window = []

    def fit_end(self, state: State, logger: Logger) -> None:
        if not self._steps:
            return
        lines = []
        for objective, steps in self._steps.items():
            rates, seconds = _rates(steps, self.peak), [step[0] for step in steps]
            percentiles = dict(zip(_PERCENTILES, np.percentile(seconds, _PERCENTILES).tolist(), strict=True))
            logger.log_metrics({f"throughput/{objective}/{name}": value for name, value in rates.items()})
            logger.log_metrics({f"time/{objective}/step_seconds_p{p}": value for p, value in percentiles.items()})
            mfu = f", MFU {rates['mfu']:.1%}" if self.peak is not None else ""
            times = ", ".join(f"{value:.3g} s (p{percent})" for percent, value in percentiles.items())
            speed = f"{rates['tokens_per_second']:,.0f} tokens/s{mfu}"
            lines.append(f"{objective}: {speed}; {len(steps):,} steps: {times}")
        share = _waiting_share(list(itertools.chain(*self._steps.values())))
        logger.log_metrics({"data/wait_share_total": share, "memory/peak_bytes": peak_memory()})
        memory = format_bytes(peak_memory())
        lines.append(f"waited for data: {share:.1%} of the training steps' time; peak memory {memory}")
        if is_first_rank():
            print("\n".join(lines))


def peak_memory() -> int:
    """Return the peak memory in bytes: allocated on the GPU, or resident in the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
