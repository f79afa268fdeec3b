"""Apply the current phase's objective (CLM or MLM) to each raw batch, as a Composer Algorithm."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from composer.core import Algorithm, Event, State, Timestamp
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.timeline import CLMPhase, MLMPhase, span_at, spans
from biphasic.data.streaming import Batch
from biphasic.model.losses import IGNORE
from biphasic.objectives.clm import clm_targets
from biphasic.objectives.mlm import Vocabulary, mlm_inputs_and_targets
from biphasic.training.prepared_batch import PreparedBatch

EVALUATIONS = ("clm", "mlm")
"""Labels of the validation dataloaders, which are the objectives that they evaluate."""


def elapsed(time: Timestamp) -> Elapsed:
    """Convert a Composer timestamp to counts."""
    return Elapsed(time.batch.value, time.sample.value, time.token.value, time.epoch.value)


class ObjectiveSchedule(Algorithm):
    """Algorithm that applies the current phase's objective to the raw token batch, on the device.

    It runs at `BATCH_START`, after the batch was loaded. The phase depends on the timestamp alone, so it starts at the
    configured batch however many batches the loader's workers have prefetched, and after a resume too. Targets are counted
    over all ranks, because the loss is the mean over the targets of the global batch.

    Args:
        phases: the YAML's `objective.phases`.
        max_duration: duration of the run, against which shares (`dur`) are resolved.
        vocabulary: which tokens exist and which are special.
        seed: random seed for the masks.
        evaluation_masking_ratio: masking ratio in MLM validation, whose masks never change.
        attention: attention backend for the batches.
        first_epoch: the epoch of the data in which the run begins (`data.start_at`).
        repeats_rows: whether an epoch repeats rows, as that of a mix does. A row then gets another mask in each batch, not
            in each epoch; rows that are repeated within a batch share one.
    """

    def __init__(
        self,
        phases: list[CLMPhase | MLMPhase],
        max_duration: Duration,
        vocabulary: Vocabulary,
        seed: int,
        evaluation_masking_ratio: float,
        attention: str,
        first_epoch: int,
        repeats_rows: bool,
    ):
        self.spans = spans(phases, max_duration)
        self.vocabulary, self.seed, self.attention = vocabulary, seed, attention
        self.first_epoch, self.repeats_rows = first_epoch, repeats_rows
        self.evaluation_phase = MLMPhase(name="mlm", masking_ratio=evaluation_masking_ratio)
        self.last_batch: Elapsed | None = None
        """When the last batch began; stored in checkpoints."""

    @property
    def phase_name(self) -> str:
        """Name of the last batch's phase."""
        return self.spans[0 if self.last_batch is None else span_at(self.spans, self.last_batch).index].phase.name

    def match(self, event: Event, state: State) -> bool:
        """Run before each batch is split into microbatches, in training and in validation."""
        return event in (Event.BATCH_START, Event.EVAL_BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the raw batch by a `PreparedBatch`. At a phase's first batch, reset the optimizer if configured."""
        batch: Batch = state.device.batch_to_device(state.batch)
        if event == Event.EVAL_BATCH_START:
            phase = CLMPhase(name="clm") if state.dataloader_label == "clm" else self.evaluation_phase
            ratio = self.evaluation_phase.masking_ratio
            assert isinstance(ratio, float)
            state.batch = self.prepare(batch, phase, None, counter=0, masking_ratio=ratio)
            return
        now = elapsed(state.timestamp)
        span = span_at(self.spans, now)
        switches = self.last_batch is not None and span.index != span_at(self.spans, self.last_batch).index
        if switches and span.phase.reset_optimizer:
            reset_optimizers(state)
        self.last_batch = now
        ratio = span.masking_ratio(now) if isinstance(span.phase, MLMPhase) else None
        counter = now.batches if self.repeats_rows else self.first_epoch + now.epochs
        state.batch = self.prepare(batch, span.phase, span.index, counter, ratio)
        metrics: dict[str, float] = {"objective/phase": span.index}
        if ratio is not None:
            metrics["objective/masking_ratio"] = ratio
        logger.log_metrics(metrics)

    def prepare(
        self, batch: Batch, phase: CLMPhase | MLMPhase, index: int | None, counter: int, masking_ratio: float | None
    ) -> PreparedBatch:
        """Apply a phase's objective to a raw batch. All ranks must call this together."""
        tokens, segment_ids, row_ids = batch["tokens"], batch["segment_ids"], batch["row_ids"]
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
        return PreparedBatch(
            objective=phase.name,
            phase=index,
            causal=isinstance(phase, CLMPhase),
            inputs=inputs,
            targets=targets,
            row_ids=row_ids,
            lengths=batch["lengths"],
            targets_per_rank=_mean_over_ranks((targets != IGNORE).sum()),
            rows_per_rank=len(batch["lengths"]),
            attention=self.attention,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return when the last batch began, as plain values that `weights_only` can load."""
        last = None if self.last_batch is None else list(astuple(self.last_batch))
        return {"repr": repr(self), "last_batch": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore when the last batch began. Its phase is one of this run's, because the checkpoint may be another run's."""
        self.last_batch = None if state["last_batch"] is None else Elapsed(*state["last_batch"])


def reset_optimizers(state: State) -> None:
    """Clear the optimizers' state (Adam's moments and step counts). Parameters and learning rates don't change."""
    for optimizer in state.optimizers:
        optimizer.state.clear()


def _mean_over_ranks(count: Tensor) -> Tensor:
    total = count.to(torch.float32)
    dist.all_reduce(total, reduce_operation="SUM")
    return (total / dist.get_world_size()).clamp(min=1.0)
