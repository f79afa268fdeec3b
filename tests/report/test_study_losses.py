"""Losses of a study's runs from their metrics."""

from __future__ import annotations

import csv
import io
import math

import pytest

from biphasic.report.statistics import mean_interval
from biphasic.report.study_losses import (
    MAX_POINTS,
    LossEvent,
    LossPoint,
    draw_losses,
    loss_events,
    loss_points,
    losses_csv,
)
from studies import config_of


def test_training_losses_are_means_over_windows() -> None:
    metrics = [
        {"batch": batch, "loss/train/clm" if batch <= 300 else "loss/train/mlm": 1 / batch}
        for batch in range(1, 5 * MAX_POINTS + 1)
    ]
    metrics[9]["loss/train/clm"] = math.nan
    metrics[99] |= {"metrics/clm/loss": 5.0, "metrics/mlm/loss": 6.0}
    points = loss_points("a", metrics, 1000)
    training = {(point.objective, point.step): point for point in points if point.split == "training"}
    assert len(training) == MAX_POINTS
    window = training["clm", 1003]
    expected = mean_interval([1 / 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert (window.loss, window.half, window.batches) == (expected.mean, expected.half, 5)
    assert training["clm", 1007.5].batches == 4  # without NaN
    assert ("mlm", 1303) in training and ("clm", 1303) not in training
    assert [point for point in points if point.split == "validation"] == [
        LossPoint("a", "validation", "clm", 1100, 5.0, None, 1),
        LossPoint("a", "validation", "mlm", 1100, 6.0, None, 1),
    ]


@pytest.mark.parametrize(("batches", "expected"), [(10, [5, 5]), (11, [5, 6]), (12, [5, 7]), (13, [5, 5, 3]), (2, [2])])
def test_a_window_of_few_batches_at_the_end_is_joined(batches: int, expected: list[int]) -> None:
    points = loss_points("a", [{"batch": batch, "loss/train/mlm": 1.0} for batch in range(1, batches + 1)], 0)
    assert [point.batches for point in points] == expected


def test_switches_and_decays() -> None:
    config = config_of("610m-clm-100-mlm40-400")
    assert loss_events("a", config, 42000) == [LossEvent("a", "switch", 42100), LossEvent("a", "decay", 42380)]
    tokens = config_of("610m-clm-400", max_duration="102400tok", schedule={"decay": "0.5dur"})
    assert loss_events("a", tokens, 0) == [LossEvent("a", "decay", 200)]
    epochs = config_of("610m-clm-400", max_duration="2ep", schedule={"decay": "1ep"})
    assert loss_events("a", epochs, 0) == []
    assert loss_events("a", config_of("610m-clm-400", schedule={}), 0) == []


def test_losses_csv() -> None:
    points = [
        LossPoint("a", "validation", "mlm", 100, 2.5, None, 1),
        LossPoint("a", "training", "mlm", 99.5, 2.25, 0.5, 2),
    ]
    rows = list(csv.DictReader(io.StringIO(losses_csv(points, [LossEvent("a", "switch", 50)]).decode())))
    assert [list(row.values()) for row in rows] == [
        ["a", "training", "mlm", "99.5", "2.25", "0.5", "2"],
        ["a", "validation", "mlm", "100", "2.5", "", "1"],
        ["a", "switch", "", "50", "", "", ""],
    ]


def test_no_losses_no_figure() -> None:
    assert draw_losses([], [LossEvent("a", "switch", 50)]) is None
    assert loss_points("a", [], 0) == []


@pytest.mark.parametrize("value", [True, False])
def test_a_run_that_has_only_begun(value: bool) -> None:
    metrics = [{"batch": 1, "loss/train/clm": 4.0}] if value else [{"batch": 1}]
    assert [point.loss for point in loss_points("a", metrics, 0)] == ([4.0] if value else [])
