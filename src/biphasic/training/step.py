"""The training step: what happens to a batch between the loader and the optimizer.

Composer's Trainer runs the loop and, for each batch, calls the parts of this module in this order:

    AFTER_DATALOADER    The rank's rows are on the host: tokens, segment ids, row ids, segment lengths (data/batches.py
                        chooses the phase's data, data/streaming.py reads it).
    BATCH_START         `WarmupStableDecay` sets the learning rate (training/optimizer.py).
                        `ObjectiveSchedule` moves the rows to the device, looks up the batch's phase, masks tokens,
                        counts the targets of all ranks, replaces the rows by a `PreparedBatch`, and seeds dropout.
    for each microbatch, a `PreparedBatch.split`:
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

Validation follows the same path without gradients: `ObjectiveSchedule` at EVAL_BATCH_START, then
`PretrainModel.eval_forward` and `update_metric`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from composer.core import Algorithm, DataSpec, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from biphasic.checkpointing.schedule import elapsed
from biphasic.config.durations import TrainingProgress
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import CLMPhase, MLMPhase, phase_at, resolve_phases
from biphasic.data.seeds import derive_seed
from biphasic.data.streaming import Batch
from biphasic.errors import UserError
from biphasic.model.language_model import LanguageModel
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments, rounded_count
from biphasic.objectives.clm import clm_targets
from biphasic.objectives.mlm import Vocabulary, mlm_inputs_and_targets
from biphasic.training.anomalies import AnomalyLog

EVALUATIONS = ("clm", "mlm")
"""Labels of the validation dataloaders: the objective that each one evaluates."""
RESUME_ADVICE = "Start again to resume from the newest checkpoint; "


# ---------------------------------------------------------------------------------------------------------------------
# The batch


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """A rank's batch or microbatch, with inputs and targets.

    Attributes:
        objective: `clm` or `mlm`.
        phase: index of the phase in the YAML; None in validation.
        causal: whether attention is causal.
        inputs: int64 [rows, length].
        targets: int64 [rows, length]; `IGNORE` where nothing is predicted.
        row_ids: int64 [rows], ids in the dataset.
        lengths: segment lengths of each row, without the padding at the row's end.
        mean_targets_per_rank: fp32 scalar, number of targets in the global batch divided by the number of ranks. DDP and
            FSDP average gradients over ranks, so each rank's summed loss is divided by this number.
        rows_per_rank: number of rows in the rank's batch, before it is split.
        bytes_per_target: fp32 scalar, mean number of bytes of text of a target in the global batch.
    """

    objective: str
    phase: int | None
    causal: bool
    inputs: Tensor
    targets: Tensor
    row_ids: Tensor
    lengths: list[list[int]]
    mean_targets_per_rank: Tensor
    rows_per_rank: int
    bytes_per_target: Tensor

    @property
    def segment_lengths(self) -> list[int]:
        """Lengths of all segments of the flattened rows. The padding at a row's end is a separate segment."""
        length, segments = self.inputs.shape[1], list[int]()
        for lengths in self.lengths:
            segments += lengths
            if (padding := length - sum(lengths)) > 0:
                segments.append(padding)
        return segments

    @cached_property
    def segments(self) -> Segments:
        """Segments of the flattened rows, computed once."""
        # Some attention kernels are prepared for each combination of number of segments and maximum length. So that few
        # combinations occur, the number is rounded, and the row length is given as the maximum.
        lengths, count = self.segment_lengths, rounded_count(len(self.segment_lengths))
        return Segments.of(lengths, self.inputs.device, self.inputs.shape[1], count)

    def split(self, rows: int) -> list[PreparedBatch]:
        """Split the batch into microbatches of up to `rows` rows."""
        by_row = ("inputs", "targets", "row_ids", "lengths")
        parts = [slice(start, start + rows) for start in range(0, len(self.lengths), rows)]
        return [replace(self, **{name: getattr(self, name)[part] for name in by_row}) for part in parts]

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedBatch:
        """Return the batch itself. Composer copies each microbatch for training metrics, but there are none."""
        return self


def data_spec(batches: Iterable[Any]) -> DataSpec:
    """Return a DataSpec that tells Composer how to count and split a dataloader's batches."""
    return DataSpec(
        batches,
        split_batch=lambda batch, rows: batch.split(int(rows)),  # pyright: ignore[reportAttributeAccessIssue]
        get_num_samples_in_batch=lambda batch: len(_lengths(batch)),
        get_num_tokens_in_batch=lambda batch: sum(map(sum, _lengths(batch))),
    )


def _lengths(batch: Batch | PreparedBatch) -> list[list[int]]:
    """Return each row's segment lengths. Composer counts a batch both before and after it is prepared."""
    return batch.lengths if isinstance(batch, PreparedBatch) else batch["lengths"]


# ---------------------------------------------------------------------------------------------------------------------
# BATCH_START: phase, inputs and targets


class ObjectiveSchedule(Algorithm):
    """Algorithm that applies the current phase's objective to the rank's rows. The switch from CLM to MLM happens here.

    A batch's phase depends only on the timestamp, so a phase starts at the configured batch regardless of how many
    batches the loader has prefetched, and also after a resume. Targets are counted over all ranks, because the loss is
    the mean over the targets of the global batch.

    Args:
        config: the run's configuration, with its phases and the masking ratio of validation, whose masks never change.
        model: the model, whose rotary positions a phase may change.
        vocabulary: which tokens exist and which are special.
        byte_lengths: number of bytes of text of each token (`TokenTexts`), for bits per byte.

    Each epoch of a dataset has new masks. In a mix, a row may occur several times in an epoch, and each batch has new masks.
    Duplicates of a row in one batch get the same mask.
    """

    def __init__(
        self, config: PretrainConfig, model: LanguageModel, vocabulary: Vocabulary, byte_lengths: Sequence[int]
    ):
        self.resolved_phases = resolve_phases(config.objective.phases, config.max_duration)
        self.inputs, self.model = config.inputs, model
        self.vocabulary, self.seed = vocabulary, config.seed
        self.byte_lengths = torch.tensor([*byte_lengths, 0])  # the last for `IGNORE`
        # A head that predicts masked tokens from the position before can't be validated at their own position.
        mlm_phases = [phase for phase in config.objective.phases if isinstance(phase, MLMPhase)]
        self.validation_phase = MLMPhase(
            name="mlm",
            masking_ratio=config.evaluation.masking_ratio,
            target=mlm_phases[-1].target if mlm_phases else "same",
        )
        self.last_batch = TrainingProgress(0, 0, 0, 0)
        """When the last batch began, or the start of the run before the first one; stored in checkpoints."""

    @property
    def phase_name(self) -> str:
        """Name of the last batch's phase."""
        return phase_at(self.resolved_phases, self.last_batch).phase.name

    def match(self, event: Event, state: State) -> bool:
        """Run before each batch is split into microbatches, in training and in validation."""
        return event in (Event.BATCH_START, Event.EVAL_BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the rank's rows by a `PreparedBatch`. At a phase's first batch, reset the optimizer if configured."""
        rows: Batch = state.device.batch_to_device(state.batch)
        if event == Event.EVAL_BATCH_START:
            self._set_positions(phase_at(self.resolved_phases, self.last_batch).index)
            phase = CLMPhase(name="clm") if state.dataloader_label == "clm" else self.validation_phase
            ratio = self.validation_phase.masking_ratio
            assert isinstance(ratio, float)
            state.batch = self.prepare(rows, phase, None, counter=0, masking_ratio=ratio)
            return
        now = elapsed(state.timestamp)
        span = phase_at(self.resolved_phases, now)
        switches = span.index != phase_at(self.resolved_phases, self.last_batch).index
        if switches and span.phase.reset_optimizer:
            for optimizer in state.optimizers:
                optimizer.state.clear()  # Adam's moments and step counts; learning rates don't change
        self.last_batch = now
        self._set_positions(span.index)
        # From the loader's batch, since reading a number on the device would wait for it.
        first_row = int(state.batch["row_ids"][0])  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]
        torch.manual_seed(derive_seed("dropout", self.seed, now.batches, first_row))
        ratio = span.masking_ratio(now) if isinstance(span.phase, MLMPhase) else None
        counter = now.batches if self.inputs[span.index].data.mix is not None else rows["epoch"]
        state.batch = self.prepare(rows, span.phase, span.index, counter, ratio)
        metrics: dict[str, float] = {"objective/phase": span.index}
        if ratio is not None:
            metrics["objective/masking_ratio"] = ratio
        logger.log_metrics(metrics)

    def _set_positions(self, phase: int) -> None:
        """Set the base of the rotary positions of a phase, if it or an earlier one changes it."""
        theta = self.inputs[phase].rope_theta
        if theta is not None and theta != self.model.rope_theta:
            self.model.set_rope_theta(theta)

    def prepare(
        self, rows: Batch, phase: CLMPhase | MLMPhase, index: int | None, counter: int, masking_ratio: float | None
    ) -> PreparedBatch:
        """Apply a phase's objective to a rank's rows. All ranks must call this together."""
        tokens, segment_ids, row_ids = rows["tokens"], rows["segment_ids"], rows["row_ids"]
        if isinstance(phase, CLMPhase):
            inputs, targets = tokens, clm_targets(tokens, segment_ids)
        else:
            assert masking_ratio is not None
            inputs, targets = mlm_inputs_and_targets(
                tokens,
                segment_ids,
                row_ids,
                self.vocabulary,
                seed=self.seed,
                counter=counter,
                masking_ratio=masking_ratio,
                random_share=phase.replacement.random,
                keep_share=phase.replacement.keep,
                target=phase.target,
            )
        self.byte_lengths = self.byte_lengths.to(targets.device)  # copied once
        target_bytes = self.byte_lengths[targets.clamp(min=-1)].sum()
        counts = torch.stack([(targets != IGNORE).sum(), target_bytes]).to(torch.float32)
        dist.all_reduce(counts, reduce_operation="SUM")
        mean_targets, mean_bytes = counts.clamp(min=1.0) / dist.get_world_size()
        return PreparedBatch(
            objective=phase.name,
            phase=index,
            causal=isinstance(phase, CLMPhase),
            inputs=inputs,
            targets=targets,
            row_ids=row_ids,
            lengths=rows["lengths"],
            mean_targets_per_rank=mean_targets,
            rows_per_rank=len(rows["lengths"]),
            bytes_per_target=mean_bytes / mean_targets,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return when the last batch began, as plain values that `weights_only` can load."""
        return {"repr": repr(self), "last_batch": list(astuple(self.last_batch))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore when the last batch began.

        The phase is not stored: it is looked up in this run's phases, because the checkpoint may come from another run.
        """
        self.last_batch = TrainingProgress(*state["last_batch"])


# ---------------------------------------------------------------------------------------------------------------------
# Forward and loss


def mean_over_global_batch(
    total: Tensor, mean_targets_per_rank: Tensor | float, rows: int, rows_per_rank: int
) -> Tensor:
    """Scale a microbatch's summed loss so that Composer's sum is the mean over the global batch's targets.

    Composer multiplies a microbatch's loss by its share of the rank's rows, `rows / rows_per_rank`, which is cancelled
    here. DDP and FSDP divide gradients by the number of ranks, which is why `mean_targets_per_rank` is the number of
    targets in the global batch divided by the number of ranks.
    """
    return total / mean_targets_per_rank / (rows / rows_per_rank)


class BitsPerByte(MeanMetric):
    """Validation metric: the summed loss in bits, divided by the bytes of text of the targets."""


class PretrainModel(ComposerModel):
    """A ComposerModel for batches prepared by `ObjectiveSchedule`. Weights have the prefix `model.`."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of targets of a microbatch."""
        return self.model(batch.inputs.flatten(), batch.targets.flatten(), batch.segments, batch.causal)

    def loss(  # pyright: ignore[reportIncompatibleMethodOverride] - Composer reads dictionaries too
        self, outputs: tuple[Tensor, Tensor], batch: PreparedBatch
    ) -> dict[str, Tensor]:
        """Return the loss as `total`, which is differentiated, and for curves by objective, in nats and in bits per byte."""
        loss = mean_over_global_batch(outputs[0], batch.mean_targets_per_rank, len(batch.lengths), batch.rows_per_rank)
        bits = loss.detach() / math.log(2) / batch.bytes_per_target
        return {"total": loss, batch.objective: loss, f"{batch.objective}_bits_per_byte": bits}

    def eval_forward(self, batch: PreparedBatch, outputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return `outputs` if given, else call `forward`."""
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the validation metrics: the mean loss per target, in nats, and bits per byte. Training logs its loss."""
        # NaN stays NaN. "disable" would keep it too, but ignores the weights (torchmetrics 1.9, issue 3434).
        metrics = {"loss": MeanMetric, "bits_per_byte": BitsPerByte}
        return {} if is_train else {name: metric(nan_strategy=math.nan) for name, metric in metrics.items()}

    def update_metric(self, batch: PreparedBatch, outputs: tuple[Tensor, Tensor], metric: Metric) -> dict[str, Any]:
        """Add a microbatch to the mean loss, or to bits per byte."""
        total, weight = outputs
        if isinstance(metric, BitsPerByte):
            # Together, the microbatches of all ranks have exactly the bytes of the global batch.
            total, weight = total / math.log(2), weight * batch.bytes_per_target
        metric.update(total / weight.clamp(min=1), weight)
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# Before the optimizer step: NaN and Inf, clipping


class GradientGuard(Algorithm):
    """Algorithm that clips the gradient norm, and checks loss and norm for NaN and Inf before the optimizer step.

    After a NaN or Inf on any rank, all ranks skip the batch: weights and optimizer state don't change, and data and learning
    rate advance. After `max_skipped` such batches in a run, the next one ends the run on all ranks, with the weights as they
    were before it. The ids of the batch's rows are written to `anomalies`.

    Logs `optimizer/grad_norm` (L2, before clipping, over all ranks) and `optimizer/skipped_batches`, including this
    batch. A `clip_norm` of None means no clipping. `advice` is the start of the error message's advice.
    """

    def __init__(self, clip_norm: float | None, max_skipped: int, anomalies: AnomalyLog, advice: str = RESUME_ADVICE):
        self.clip_norm, self.max_skipped, self.anomalies, self.advice = clip_norm, max_skipped, anomalies, advice
        self.skipped = 0
        self._loss_is_bad: Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run after each microbatch's loss, and before the optimizer step."""
        return event in (Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check a microbatch's loss, or clip the batch's gradients and skip the batch if loss or norm is NaN or Inf.

        Raises:
            UserError: loss or gradient norm is NaN or Inf after `max_skipped` skips; raised on all ranks.
        """
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
            before = f" ({self.max_skipped} skipped before)" if self.max_skipped else ""
            raise UserError(
                f"batch {int(state.timestamp.batch)}: the {quantity} is not a finite number{before}; the batch didn't "
                f"change the weights. The ids of its rows are in {self.anomalies.file} (first: {row_ids[0]}). {self.advice}"
                "optimizer.max_skipped_batches: N skips up to N such batches, and a smaller optimizer.lr or clip_norm may "
                "prevent them"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped batches."""
        return {"repr": "GradientGuard", "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of skipped batches."""
        self.skipped = state["skipped"]
