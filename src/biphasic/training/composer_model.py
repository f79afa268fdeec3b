"""Wrap the language model as a ComposerModel, with the loss averaged over the global batch."""

from __future__ import annotations

import math
from typing import Any

from composer.models import ComposerModel
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from biphasic.model.language_model import LanguageModel
from biphasic.training.prepared_batch import PreparedBatch


def mean_over_global_batch(total: Tensor, targets_per_rank: Tensor | float, rows: int, rows_per_rank: int) -> Tensor:
    """Scale a microbatch's summed loss so that Composer's sum is the mean over the global batch's targets.

    Composer multiplies a microbatch's loss by its share of the rank's rows and averages over ranks. Both weights count rows
    or ranks instead of targets, so they are undone here.

    Args:
        total: summed loss of the microbatch.
        targets_per_rank: number of targets in the global batch, divided by the number of ranks.
        rows: number of rows in the microbatch.
        rows_per_rank: number of rows in the rank's batch.
    """
    return total / targets_per_rank / (rows / rows_per_rank)


class PretrainModel(ComposerModel):
    """A ComposerModel for batches prepared by `ObjectiveSchedule`. Checkpoints store its weights as `model.…`."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of targets of a microbatch."""
        return self.model(batch.inputs.flatten(), batch.targets.flatten(), batch.segments, batch.causal)

    def loss(  # pyright: ignore[reportIncompatibleMethodOverride] - Composer reads dictionaries too
        self, outputs: tuple[Tensor, Tensor], batch: PreparedBatch
    ) -> dict[str, Tensor]:
        """Return the loss as `total`, which is differentiated, and under the objective's name, for a curve per objective."""
        loss = mean_over_global_batch(outputs[0], batch.targets_per_rank, len(batch.lengths), batch.rows_per_rank)
        return {"total": loss, batch.objective: loss}

    def eval_forward(self, batch: PreparedBatch, outputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return `outputs` if given, else call `forward`."""
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the validation metric: the mean loss per target, in nats. Training has none, since it logs its loss."""
        # A NaN stays NaN. "disable" would do so too, but it ignores the weights (torchmetrics 1.9, its issue 3434).
        return {} if is_train else {"loss": MeanMetric(nan_strategy=math.nan)}

    def update_metric(self, batch: PreparedBatch, outputs: tuple[Tensor, Tensor], metric: Metric) -> dict[str, Any]:
        """Add a microbatch to the mean loss."""
        total, targets = outputs
        metric.update(total / targets.clamp(min=1), targets)
        return {}
