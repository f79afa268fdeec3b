"""The training step: what happens to a batch between the loader and the optimizer.

Composer's Trainer runs the loop and, for each batch, calls the parts of this module in this order:

    AFTER_DATALOADER    The rank's rows are on the host: token ids, segment ids, row ids, segment lengths (data/batches.py
                        chooses the phase's data, data/streaming.py reads it).
    BATCH_START         `WarmupStableDecay` sets the learning rate (training/optimizer.py).
                        `ObjectiveSwitch` (training/switch.py) looks up the batch's phase, moves the rows to the device,
                        masks tokens, counts the targets of all ranks, and seeds dropout (objectives/batch.py).
    for each microbatch, some rows of the batch:
        forward         `PretrainModel.forward`: `LanguageModel` computes hidden states and the loss summed over the targets.
        loss            `PretrainModel.loss` scales the sum so that all microbatches and ranks together give the mean
                        over the targets of the global batch.
        AFTER_LOSS      `GradientGuard` checks the loss for NaN and Inf.
        backward        Gradients are summed over microbatches; DDP and FSDP2 average them over ranks.
    AFTER_TRAIN_BATCH   `GradientGuard` clips the gradient norm. After a NaN or Inf on any rank, all ranks drop the
                        gradients, or stop (the default, `optimizer.max_skipped_batches: 0`).
    optimizer.step      Parameters without a gradient don't change.
    BATCH_END           `SpikeDetector`, meters, run record and loggers (training/); the ranks agree on whether to
                        stop. Validation runs here if it is due.
    BATCH_CHECKPOINT    `Saver` saves if a checkpoint is due (checkpointing/save.py).

Validation follows the same path without gradients: `ObjectiveSwitch` at EVAL_BATCH_START, then
`PretrainModel.eval_forward` and `update_metric`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from composer.core import Algorithm, DataSpec, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from biphasic.errors import UserError
from biphasic.model.language_model import LanguageModel
from biphasic.objectives.batch import Batch, segments_of, step_of
from biphasic.training.anomalies import AnomalyLog, phase_of

RESUME_ADVICE = "`biphasic show {config} {row}` prints its text. Start again to resume from the newest checkpoint; "


def data_spec(batches: Iterable[Any]) -> DataSpec:
    """Return a DataSpec that tells Composer how to count a dataloader's batches. Padding is not counted."""
    return DataSpec(
        batches,
        get_num_samples_in_batch=lambda batch: len(batch["input_ids"]),
        get_num_tokens_in_batch=lambda batch: sum(map(sum, batch["lengths"])),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Forward and loss


class BitsPerByte(MeanMetric):
    """Validation metric: the summed loss in bits, divided by the bytes of text of the targets."""


class PretrainModel(ComposerModel):
    """A ComposerModel for batches prepared by `ObjectiveSwitch`. Weights have the prefix `model.`."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch["input_ids"].flatten(), batch["labels"].flatten()
        return self.model(inputs, targets, segments_of(batch), step_of(batch).causal)

    def loss(  # pyright: ignore[reportIncompatibleMethodOverride] - Composer reads dictionaries too
        self, outputs: tuple[Tensor, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        # `total` is differentiated; the others are curves by objective.
        step = step_of(batch)
        loss, name = step.mean_loss(outputs[0], len(batch["input_ids"])), step.objective.name
        bits = loss.detach() / math.log(2) / step.bytes_per_target
        return {"total": loss, name: loss, f"{name}_bits_per_byte": bits}

    def eval_forward(self, batch: Batch, outputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        # NaN stays NaN. "disable" would keep it too, but ignores the weights (torchmetrics 1.9, issue 3434).
        metrics = {"loss": MeanMetric, "bits_per_byte": BitsPerByte}
        return {} if is_train else {name: metric(nan_strategy=math.nan) for name, metric in metrics.items()}

    def update_metric(self, batch: Batch, outputs: tuple[Tensor, Tensor], metric: Metric) -> dict[str, Any]:
        total, weight = outputs
        if isinstance(metric, BitsPerByte):
            # The number of bytes is that of the global batch, spread evenly over its targets: exact once all are added.
            total, weight = total / math.log(2), weight * step_of(batch).bytes_per_target
        metric.update(total / weight.clamp(min=1), weight)
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# Before the optimizer step: NaN and Inf, clipping


class GradientGuard(Algorithm):
    """Algorithm that clips the gradient norm, and checks loss and norm for NaN and Inf before the optimizer step.

    After a NaN or Inf on any rank, all ranks skip the batch: weights and optimizer state don't change, and data and learning
    rate advance. After `max_skipped` such batches in a run, the next one raises a UserError on all ranks, with the weights
    as they were before it. The ids of the batch's rows are written to `anomalies`.

    Logs `optimizer/grad_norm` (L2, before clipping, over all ranks) and `optimizer/skipped_batches`, including this
    batch. A `clip_norm` of None means no clipping. `advice` is the start of the error message's advice, with
    places for the run's `config` and a `row`.
    """

    def __init__(self, clip_norm: float | None, max_skipped: int, anomalies: AnomalyLog, advice: str = RESUME_ADVICE):
        self.clip_norm, self.max_skipped, self.anomalies, self.advice = clip_norm, max_skipped, anomalies, advice
        self.skipped = 0
        self._loss_is_bad: Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_LOSS:
            loss: Any = state.loss
            is_bad = ~torch.isfinite(loss["total"].detach())
            self._loss_is_bad = is_bad if self._loss_is_bad is None else self._loss_is_bad | is_bad
            return
        limit = self.clip_norm if self.clip_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert self._loss_is_bad is not None
        flags = torch.stack([self._loss_is_bad.reshape(()), ~torch.isfinite(norm)]).to(torch.int32)
        self._loss_is_bad = None
        dist.all_reduce(flags, reduce_operation="MAX")
        bad_loss, bad_norm = flags.tolist()
        is_bad = bool(bad_loss or bad_norm)
        self.skipped += is_bad
        logger.log_metrics({"optimizer/grad_norm": float(norm), "optimizer/skipped_batches": self.skipped})
        if is_bad:
            self._skip(state, "loss" if bad_loss else "gradient's norm", float(norm))

    def _skip(self, state: State, quantity: str, norm: float) -> None:
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        row_ids = self.anomalies.write(state, {"anomaly": "not finite", "quantity": quantity, "norm": str(norm)})
        if self.skipped > self.max_skipped:
            phase, config = phase_of(state.batch), self.anomalies.file.with_name("config.yaml")
            advice = self.advice.format(config=config, row=f"{row_ids[0]}{f' --phase {phase}' if phase else ''}")
            before = f" ({self.max_skipped} skipped before)" if self.max_skipped else ""
            raise UserError(
                f"batch {int(state.timestamp.batch)}: the {quantity} is not a finite number{before}; the batch didn't "
                f"change the weights. The ids of its rows are in {self.anomalies.file} (first: {row_ids[0]}). {advice}"
                "optimizer.max_skipped_batches: N skips up to N such batches, and a smaller optimizer.lr or clip_norm may "
                "prevent them"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"repr": "GradientGuard", "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
