"""The switch: a Composer Algorithm that turns each raw batch into the current phase's inputs and targets."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Algorithm, Event, State, Timestamp
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.errors import UserError
from biphasic.config.schema import CLMPhase, MLMPhase
from biphasic.config.timeline import Span, span_at, spans
from biphasic.data.streaming import Batch, rows_in_batch
from biphasic.model.losses import IGNORE
from biphasic.objectives.clm import clm_targets
from biphasic.objectives.mlm import Vocabulary, mlm_inputs_and_targets

EVALUATIONS = ("clm", "mlm")
"""Labels of the validation loaders: the objective that each is scored by."""


def elapsed(time: Timestamp) -> Elapsed:
    """Composer's timestamp, as counts."""
    return Elapsed(time.batch.value, time.sample.value, time.token.value, time.epoch.value)


class ObjectiveSchedule(Algorithm):
    """Applies the phase that the timestamp falls into, on the device, to the raw token batch.

    It runs when the batch is already there (`BATCH_START`), so however many batches the loader's workers have read
    ahead, the first batch of a phase is the one that the plan names. Nothing but the timestamp decides, so the same holds
    after a resume. It also counts what the batch predicts over all ranks: the loss is the mean over those tokens,
    whatever the microbatches and ranks they fall into.

    Args:
        phases: the YAML's `objective.phases`.
        max_duration: of the run; shares are resolved against it once, here.
        vocabulary: which tokens exist and which are special.
        seed: of the masks.
        evaluation_masking_ratio: of the MLM validation, whose masks never change.
    """

    def __init__(
        self,
        phases: list[CLMPhase | MLMPhase],
        max_duration: Duration,
        vocabulary: Vocabulary,
        seed: int,
        evaluation_masking_ratio: float = 0.4,
    ):
        self.spans = spans(phases, max_duration)
        self.vocabulary = vocabulary
        self.seed = seed
        self.evaluation_phase = MLMPhase(name="mlm", masking_ratio=evaluation_masking_ratio)
        self.current: int | None = None
        """Index of the phase that the last batch was in; stored with checkpoints."""

    @property
    def phase_now(self) -> str:
        """Name of the last batch's phase."""
        return self.spans[self.current or 0].phase.name

    def match(self, event: Event, state: State) -> bool:
        """Before each batch is cut into microbatches, in training and in validation."""
        return event in (Event.BATCH_START, Event.EVAL_BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the batch; in training, also do what the beginning of a phase asks for."""
        batch: Batch = state.device.batch_to_device(state.batch)
        if event == Event.EVAL_BATCH_START:
            phase = CLMPhase(name="clm") if state.dataloader_label == "clm" else self.evaluation_phase
            ratio = self.evaluation_phase.masking_ratio
            assert isinstance(ratio, float)
            state.batch = self.objective(batch, phase, epoch=0, masking_ratio=ratio)
            return
        now = elapsed(state.timestamp)
        span = span_at(self.spans, now)
        if self.current is not None and span.index != self.current and span.phase.reset_optimizer:
            reset_optimizers(state)
        self.current = span.index
        ratio = span.masking_ratio(now) if isinstance(span.phase, MLMPhase) else None
        state.batch = self.objective(batch, span.phase, now.epochs, ratio)
        metrics: dict[str, float] = {"objective/phase": span.index}
        if ratio is not None:
            metrics["objective/masking_ratio"] = ratio
        logger.log_metrics(metrics)

    def objective(self, batch: Batch, phase: CLMPhase | MLMPhase, epoch: int, masking_ratio: float | None) -> Batch:
        """The batch with `inputs`, `targets`, `causal`, and what its loss is divided by.

        `targets_per_rank` (fp32 scalar) is the number of predicted tokens of the global batch over the ranks, which is
        what Composer's averaging over ranks leaves to divide by.
        """
        tokens, segment_ids = batch["tokens"], batch["segment_ids"]
        if isinstance(phase, CLMPhase):
            inputs, targets = tokens, clm_targets(tokens, segment_ids)
        else:
            assert masking_ratio is not None
            inputs, targets = mlm_inputs_and_targets(
                tokens,
                segment_ids,
                batch["rows"],
                self.vocabulary,
                seed=self.seed,
                epoch=epoch,
                masking_ratio=masking_ratio,
                random_share=phase.replacement.random,
                keep_share=phase.replacement.keep,
                target=phase.target,
            )
        return {
            **batch,
            "inputs": inputs,
            "targets": targets,
            "objective": phase.name,
            "targets_per_rank": _mean_over_ranks((targets != IGNORE).sum()),
            "rows_in_batch": rows_in_batch(batch),
        }

    def state_dict(self) -> dict[str, Any]:
        """The phase of the last batch, and where every phase lies: plain values, readable with `weights_only`."""
        return {"repr": repr(self), "current": self.current, "boundaries": [_written(span) for span in self.spans]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's phase.

        Raises:
            UserError: a phase that is already over lay elsewhere in the run that wrote the checkpoint.
        """
        self.current = state["current"]
        before = state["boundaries"][: self.current or 0]
        for index, (then, span) in enumerate(zip(before, self.spans, strict=False)):
            if then != _written(span):
                raise UserError(
                    f"objective.phases.{index}: the checkpoint was trained with `{then}`, this configuration says "
                    f"`{_written(span)}`. A share (dur) moves when max_duration changes: write the first as it was"
                )


def reset_optimizers(state: State) -> None:
    """Forget the optimizers' moments and step counts; parameters and learning rates stay."""
    for optimizer in state.optimizers:
        optimizer.state.clear()


def _written(span: Span) -> str:
    return f"{span.phase.name} until {span.end}"


def _mean_over_ranks(count: Tensor) -> Tensor:
    total = count.to(torch.float32)
    dist.all_reduce(total, reduce_operation="SUM")
    return (total / dist.get_world_size()).clamp(min=1.0)
