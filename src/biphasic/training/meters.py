"""How fast training is, against what the device could do, and what it waits for."""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import dataclass, field

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.amounts import in_bytes
from biphasic.config.architecture import Architecture
from biphasic.data.streaming import Batch, row_segments
from biphasic.model.device import dense_peak

_log = logging.getLogger(__name__)
_PERCENTILES = (50, 90, 99)


@dataclass
class _Spent:
    """Seconds in steps, and what was done in them."""

    seconds: list[float] = field(default_factory=list)
    waiting: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    hardware_flops: float = 0.0

    def add(self, seconds: float, waiting: float, tokens: int, flops: tuple[float, float]) -> None:
        self.seconds.append(seconds)
        self.waiting += waiting
        self.tokens += tokens
        self.flops += flops[0]
        self.hardware_flops += flops[1]

    @property
    def waiting_share(self) -> float:
        return self.waiting / max(sum(self.seconds), 1e-9)

    def percentile(self, share: int) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) * share // 100, len(ordered) - 1)]

    def per_second(self, peak: float | None) -> dict[str, float]:
        """Tokens of all ranks, a rank's FLOPs, and these over its device's peak."""
        whole = max(sum(self.seconds), 1e-9)
        found = {"tokens_per_second": self.tokens / whole, "flops_per_second": self.flops / whole}
        if peak is not None:
            found |= {"mfu": self.flops / whole / peak, "hfu": self.hardware_flops / whole / peak}
        return found


class Meters(Callback):
    """Logs how long steps take, how many tokens and FLOPs are trained in a second, and how long a step waits for its batch.

    A step lasts from asking for a batch to the end of its training; validation and checkpoints are between steps. Tokens
    are those of documents, of all ranks; padding isn't counted. FLOPs are a rank's, as `Architecture.flops` counts them,
    with the segments and the predicted positions that the batch has. MFU is their rate over the device's dense peak in the
    compute type, HFU that of `Architecture.hardware_flops`; both are missing where the peak isn't known, as on CPUs.

    Logged: with each batch `time/step_seconds` and `data/wait_seconds`; over each window of batches `data/wait_share`, and
    under `throughput/` `tokens_per_second`, `flops_per_second`, `mfu`, `hfu`; with them `memory/peak_bytes`, on a GPU what
    was allocated at most, on CPUs the process's. At the end the same for each objective (`throughput/clm/mfu`), the steps'
    percentiles (`time/clm/step_seconds_p50`, `_p90`, `_p99`) and `data/wait_share_total`, and all of it in words.

    The first step of an attempt is left out: it waits for the loader's processes and for compilers. A rank also waits for
    the slowest of the others, so the first rank's numbers speak for all. Nothing is kept in checkpoints.

    Args:
        size: of the model.
        recomputed: layers that are computed again in the backward pass.
        precision: the type that matrices are multiplied in.
        window: batches.
        too_long: share of the time spent waiting above which a window's end warns.
    """

    def __init__(
        self,
        size: Architecture,
        recomputed: int = 0,
        precision: torch.dtype = torch.float32,
        window: int = 50,
        too_long: float = 0.1,
    ):
        self.size, self.recomputed, self.window, self.too_long = size, recomputed, window, too_long
        gpu = torch.cuda.is_available()
        self.peak = dense_peak(torch.cuda.get_device_name(), precision) if gpu else None
        self._begin()

    def _begin(self) -> None:
        self._total: dict[str, _Spent] = {}
        self._recent = _Spent()
        self._asked = 0.0
        self._waiting = 0.0
        self._flops = (0.0, 0.0)
        self._started = False

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

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Count the batch's FLOPs, while the device waits for the host anyway: the norm of the gradient was just read."""
        batch: Batch = state.batch
        causal, predicted = batch["objective"] == "clm", float(batch["targets_per_rank"])
        real = [length for lengths in batch["lengths"] for length in lengths]
        self._flops = (
            self.size.flops(real, causal, predicted),
            self.size.hardware_flops(row_segments(batch), causal, predicted, self.recomputed),
        )

    def batch_end(self, state: State, logger: Logger) -> None:
        """It is trained on."""
        seconds = time.perf_counter() - self._asked
        if not self._started:
            self._started = True
            return
        before = state.previous_timestamp
        tokens = state.timestamp.token.value - (before.token.value if before is not None else 0)
        logger.log_metrics({"time/step_seconds": seconds})
        for spent in (self._recent, self._total.setdefault(state.batch["objective"], _Spent())):
            spent.add(seconds, self._waiting, tokens, self._flops)
        if len(self._recent.seconds) == self.window:
            self._end_of_window(logger)

    def _end_of_window(self, logger: Logger) -> None:
        share = self._recent.waiting_share
        found = {f"throughput/{name}": value for name, value in self._recent.per_second(self.peak).items()}
        logger.log_metrics({"data/wait_share": share, "memory/peak_bytes": peak_memory(), **found})
        if share > self.too_long and dist.get_global_rank() == 0:
            _log.warning(
                "the run waits for data: %.0f%% of the last %d steps' time; raise data.num_workers or data.predownload, "
                "or give it a larger data.cache_limit or a faster way to its shards",
                100 * share,
                self.window,
            )
        self._recent = _Spent()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Say it for the whole training."""
        if not self._total:
            return
        lines = []
        for objective, spent in self._total.items():
            speed = spent.per_second(self.peak)
            steps = {f"step_seconds_p{share}": spent.percentile(share) for share in _PERCENTILES}
            logger.log_metrics({f"throughput/{objective}/{name}": value for name, value in speed.items()})
            logger.log_metrics({f"time/{objective}/{name}": value for name, value in steps.items()})
            of_peak = f", MFU {speed['mfu']:.1%}, HFU {speed['hfu']:.1%}" if self.peak is not None else ""
            times = ", ".join(
                f"{value:.3g} s (p{share})" for share, value in zip(_PERCENTILES, steps.values(), strict=True)
            )
            lines.append(f"{objective}: {speed['tokens_per_second']:,.0f} tokens/s{of_peak}; {len(spent.seconds):,} steps: "
                         f"{times}")  # fmt: skip
        waiting = sum(spent.waiting for spent in self._total.values())
        share = waiting / max(sum(sum(spent.seconds) for spent in self._total.values()), 1e-9)
        logger.log_metrics({"data/wait_share_total": share, "memory/peak_bytes": peak_memory()})
        lines.append(f"waited for data: {share:.1%} of the training steps' time; peak memory {in_bytes(peak_memory())}")
        if dist.get_global_rank() == 0:
            print("\n".join(lines))


def peak_memory() -> int:
    """Bytes: on a GPU what was allocated at most, otherwise what the process had in memory at most."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
