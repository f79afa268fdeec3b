"""The validation loss."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn
from torchmetrics import Metric

from biphasic.training.step import PretrainModel


def mean_loss(*microbatches: tuple[float, int]) -> float:
    """The metric after microbatches with these summed losses and numbers of targets."""
    model = PretrainModel(cast("Any", nn.Linear(1, 1)))
    metric: Metric = model.get_metrics()["loss"]
    for total, targets in microbatches:
        model.update_metric(cast("Any", None), (torch.tensor(total), torch.tensor(targets)), metric)
    return float(metric.compute())


def test_the_validation_loss_is_the_mean_over_targets() -> None:
    assert mean_loss((2.0, 1), (12.0, 3)) == 3.5
    assert mean_loss((2.0, 1), (0.0, 0), (12.0, 3)) == 3.5, "a microbatch without a target changes nothing"


def test_nan_is_not_left_out() -> None:
    assert math.isnan(mean_loss((2.0, 1), (math.nan, 3)))
