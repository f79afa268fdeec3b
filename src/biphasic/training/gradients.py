"""Clip gradients, and detect NaN, Inf and loss spikes during training."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from biphasic.errors import UserError

ODD_BATCHES = "odd_batches.jsonl"
RESUME_ADVICE = "Start again to resume from the newest checkpoint; "
_WINDOW, _MIN_LOSSES = 100, 20


class Gradients(Algorithm):
    """Algorithm that clips the gradient norm, and checks loss and norm for NaN and Inf before the optimizer step.

    After a NaN or Inf on any rank, all ranks skip the batch: weights and optimizer state don't change, and data and learning
    rate advance. After `max_skipped` such batches in a run, the next one ends the run on all ranks, with the weights as they
    were before it. A loss above `spike` times the median of the last 100 batches of the same objective is logged. In both
    cases the ids of the batch's rows are written to `odd_batches.jsonl`; `biphasic show FILE.yaml ID ...` prints their
    text.

    Logs `optimizer/grad_norm` (L2, before clipping, over all ranks) and `optimizer/skipped_batches`, with this batch.

    Args:
        clip_norm: maximum gradient norm; None: no clipping.
        max_skipped: maximum number of skipped batches in a run.
        spike: a loss above this multiple of the median is a spike; None: no spike detection.
        folder: the run's folder, on rank 0's node.
        objective_and_row_ids: returns a batch's objective and row ids.
        advice: start of the advice in the error message.
    """

    def __init__(
        self,
        clip_norm: float | None,
        max_skipped: int,
        spike: float | None,
        folder: Path,
        objective_and_row_ids: Callable[[Any], tuple[str, Tensor]],
        advice: str = RESUME_ADVICE,
    ):
        self.clip_norm, self.max_skipped, self.spike = clip_norm, max_skipped, spike
        self.file, self.objective_and_row_ids, self.advice = folder / ODD_BATCHES, objective_and_row_ids, advice
        self.skipped = 0
        self._loss_is_bad: Tensor | None = None
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._objective = ""

    def match(self, event: Event, state: State) -> bool:
        """Run after each microbatch's loss, before the optimizer step, and at the end of the batch."""
        return event in (Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check loss and gradient norm for NaN and Inf, or the batch's loss for a spike.

        Raises:
            UserError: loss or gradient norm is NaN or Inf after `max_skipped` skips; raised on all ranks.
        """
        if event == Event.AFTER_LOSS:
            loss: Any = state.loss
            is_bad = ~torch.isfinite(loss["total"].detach())
            self._loss_is_bad = is_bad if self._loss_is_bad is None else self._loss_is_bad | is_bad
        elif event == Event.AFTER_TRAIN_BATCH:
            self._check_before_step(state, logger)
        else:
            self._detect_spike(state, logger)

    def _check_before_step(self, state: State, logger: Logger) -> None:
        norm = self._clip(state)
        assert self._loss_is_bad is not None
        flags = torch.stack([self._loss_is_bad.reshape(()), ~torch.isfinite(norm)]).to(torch.int32)
        self._loss_is_bad = None
        dist.all_reduce(flags, reduce_operation="MAX")
        bad_loss, bad_norm = flags.tolist()
        is_bad = bool(bad_loss or bad_norm)
        self.skipped += is_bad
        logger.log_metrics({"optimizer/grad_norm": float(norm), "optimizer/skipped_batches": self.skipped})
        if not is_bad:
            return
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        quantity = "loss" if bad_loss else "gradient's norm"
        row_ids = self._record(state, {"what": "not finite", "of": quantity, "norm": str(float(norm))})
        if self.skipped > self.max_skipped:
            before = f" ({self.max_skipped} were skipped before)" if self.max_skipped else ""
            raise UserError(
                f"batch {int(state.timestamp.batch)}: the {quantity} is not a finite number{before}; the weights are as "
                f"they were before it. Its rows are in {self.file} (the first: {row_ids[0]}). {self.advice}"
                "optimizer.max_skipped_batches: N skips up to N such batches, and a smaller optimizer.lr or clip_norm may "
                "prevent them"
            )

    def _clip(self, state: State) -> Tensor:
        limit = self.clip_norm if self.clip_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _detect_spike(self, state: State, logger: Logger) -> None:
        objective, _ = self.objective_and_row_ids(state.batch)
        if objective != self._objective:
            self._objective = objective
            self._losses.clear()
        loss: float | None = (state.total_loss_dict or {}).get("loss/train/total")
        if loss is None or self.spike is None or loss != loss:
            return
        if len(self._losses) >= _MIN_LOSSES and loss > self.spike * (median := statistics.median(self._losses)):
            logger.log_metrics({"loss/spike": loss / median})
            self._record(state, {"what": "spike", "loss": loss, "median": median})
        self._losses.append(loss)

    def _record(self, state: State, fields: dict[str, Any]) -> list[int]:
        """Write a line about the batch to the file. Return the ids of the batch's rows on all ranks."""
        _, local_row_ids = self.objective_and_row_ids(state.batch)
        row_ids = [row for rank in dist.all_gather_object(local_row_ids.tolist()) for row in rank]
        if dist.get_global_rank() == 0:
            # A spike is detected after Composer has counted the batch.
            batch = int(state.timestamp.batch) - (fields["what"] == "spike")
            line = {"batch": batch, "epoch": int(state.timestamp.epoch), **fields, "rows": row_ids}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        return row_ids

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped batches and the last losses, as plain values."""
        losses = {"recent": list(self._losses), "objective": self._objective}
        return {"repr": "Gradients", "skipped": self.skipped, **losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of skipped batches and the last losses."""
        self.skipped, self._objective = state["skipped"], state["objective"]
        self._losses = deque(state["recent"], maxlen=_WINDOW)
