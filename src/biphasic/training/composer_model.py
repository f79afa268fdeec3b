"""The language model as Composer trains it."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor
from torchmetrics import Metric

from biphasic.data.streaming import Batch, row_segments, rows_in_batch
from biphasic.model.language_model import LanguageModel
from biphasic.model.segments import Segments


class MeanLoss(Metric):
    """Mean loss over predicted tokens, in nats, over all batches and ranks."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add a batch's summed loss and its number of predicted tokens."""
        self.total += total.double()
        self.count += count

    def compute(self) -> Tensor:
        """The mean so far."""
        return (self.total / self.count.clamp(min=1)).float()


class PretrainModel(ComposerModel):
    """Takes batches that `ObjectiveSchedule` has prepared.

    Args:
        model: backbone and head; its weights are named `model.…` in checkpoints.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and number of predicted tokens of a microbatch."""
        inputs = batch["inputs"]
        # A row's length bounds its segments', whatever they are in this batch.
        segments = Segments.of(row_segments(batch), inputs.device, inputs.shape[1], self.model.attention)
        causal = batch["objective"] == "clm"
        return self.model(inputs.flatten(), batch["targets"].flatten(), segments, causal)

    def loss(  # pyright: ignore[reportIncompatibleMethodOverride] - Composer reads dictionaries too
        self, outputs: tuple[Tensor, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """What is differentiated, under `total`, and again under the objective's name, so that each has its own curve.

        Composer multiplies a microbatch's loss by its share of the rows and averages over ranks. Neither is a share of
        the predicted tokens, so the first is undone here and the division is by the whole batch's count.
        """
        share_of_rows = rows_in_batch(batch) / batch["rows_in_batch"]
        loss = outputs[0] / batch["targets_per_rank"] / share_of_rows
        return {"total": loss, batch["objective"]: loss}

    def eval_forward(self, batch: Batch, outputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """As `forward`."""
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """The mean loss of a validation; training logs its own."""
        return {} if is_train else {"loss": MeanLoss()}

    def update_metric(self, batch: Batch, outputs: tuple[Tensor, Tensor], metric: Metric) -> dict[str, Any]:
        """Add a batch to the mean."""
        metric.update(*outputs)
        return {}
