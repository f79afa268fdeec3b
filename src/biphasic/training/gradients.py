"""The last look at gradients before the weights change: clipping, and numbers that are no numbers."""

from __future__ import annotations

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from biphasic.config.errors import UserError
from biphasic.data.streaming import Batch

ODD_BATCHES = "odd_batches.jsonl"
RESUMES = "Start again to go on from the newest checkpoint; "
_WINDOW, _ENOUGH = 100, 20


class Gradients(Algorithm):
    """Clips the norm of the gradient, and looks at loss and norm before the optimizer's step.

    A loss or a norm that is NaN or infinite on any rank ends the run on all of them, with the weights as they were before
    the batch; or, up to `may_skip` times in a run, the batch is left out: no weight, no moment and no step count of the
    optimizer changes, and the data and the learning rate go on. A loss above `spike` times the median of the phase's last
    100 batches is logged. Either way the ids of the batch's rows go to `odd_batches.jsonl`, where
    `data_prep/show.py FILE.yaml ID ...` prints their text.

    Logged: `optimizer/grad_norm` (L2, before clipping, all ranks together), `optimizer/skipped_batches`.

    Args:
        clip_norm: largest norm; None: no clipping.
        may_skip: batches.
        spike: factor; None: spikes aren't looked for.
        folder: of the run, on the first rank's machine.
        after: what can be done once the run has ended, for its message.
    """

    def __init__(self, clip_norm: float | None, may_skip: int, spike: float | None, folder: Path, after: str = RESUMES):
        self.clip_norm, self.may_skip, self.spike, self.file = clip_norm, may_skip, spike, folder / ODD_BATCHES
        self.after = after
        self.skipped = 0
        self._bad: Tensor | None = None
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._objective = ""

    def match(self, event: Event, state: State) -> bool:
        """After each microbatch's loss, before the optimizer's step, and when the batch is done."""
        return event in (Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Look.

        Raises:
            UserError: loss or gradient are no numbers, on all ranks.
        """
        if event == Event.AFTER_LOSS:
            loss: Any = state.loss
            bad = ~torch.isfinite(loss["total"].detach())
            self._bad = bad if self._bad is None else self._bad | bad
        elif event == Event.AFTER_TRAIN_BATCH:
            self._before_step(state, logger)
        else:
            self._look_for_spike(state, logger)

    def _before_step(self, state: State, logger: Logger) -> None:
        norm = self._clip(state)
        assert self._bad is not None
        wrong = torch.stack([self._bad.reshape(()), ~torch.isfinite(norm)]).to(torch.int32)
        self._bad = None
        dist.all_reduce(wrong, reduce_operation="MAX")
        bad_loss, bad_norm = wrong.tolist()
        logger.log_metrics({"optimizer/grad_norm": float(norm), "optimizer/skipped_batches": self.skipped})
        if not bad_loss and not bad_norm:
            return
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        what = "loss" if bad_loss else "gradient's norm"
        rows = self._note(state, {"what": "not finite", "of": what, "norm": str(float(norm))})
        if self.skipped > self.may_skip:
            allowed = f" ({self.may_skip} were left out before)" if self.may_skip else ""
            raise UserError(
                f"batch {int(state.timestamp.batch)}: the {what} is not a finite number{allowed}; the weights are as they "
                f"were before it. Its rows are in {self.file} (the first: {rows[0]}). {self.after}optimizer.skip_nonfinite: "
                "N leaves out up to N such batches, and a smaller optimizer.lr or clip_norm may prevent them"
            )

    def _clip(self, state: State) -> Tensor:
        limit = self.clip_norm if self.clip_norm is not None else float("inf")
        if state.fsdp_config_version == 1:
            roots = (
                one
                for one in state.model.modules()
                if isinstance(one, FullyShardedDataParallel) and one.check_is_root()
            )
            return torch.stack([root.clip_grad_norm_(limit).float() for root in roots]).norm()
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _look_for_spike(self, state: State, logger: Logger) -> None:
        losses: dict[str, float] = state.total_loss_dict or {}
        loss = losses.get("loss/train/total")
        objective = next((name for name in losses if name != "loss/train/total"), "")
        if objective != self._objective:
            self._objective = objective
            self._recent.clear()
        if loss is None or self.spike is None or loss != loss:
            return
        if len(self._recent) >= _ENOUGH and loss > self.spike * (median := statistics.median(self._recent)):
            logger.log_metrics({"loss/spike": loss / median})
            self._note(state, {"what": "spike", "loss": loss, "median": median})
        self._recent.append(loss)

    def _note(self, state: State, about: dict[str, Any]) -> list[int]:
        batch: Batch = state.batch
        rows = [row for ranks in dist.all_gather_object(batch["rows"].tolist()) for row in ranks]
        if dist.get_global_rank() == 0:
            done = int(state.timestamp.batch) - (about["what"] == "spike")
            line = {"batch": done, "epoch": int(state.timestamp.epoch), **about, "rows": rows}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What was left out, and the losses that the next one is compared with: plain values."""
        return {
            "repr": "Gradients",
            "skipped": self.skipped,
            "recent": list(self._recent),
            "objective": self._objective,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.skipped, self._objective = state["skipped"], state["objective"]
        self._recent = deque(state["recent"], maxlen=_WINDOW)
