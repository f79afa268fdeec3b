"""Losses of a study's runs from their metrics."""

import math

import pandas as pd
import pytest

from biphasic.config.pretrain import PretrainConfig
from biphasic.report.statistics import mean_interval
from biphasic.report.study_losses import MAX_POINTS, loss_events, loss_points, losses_figure
from helpers.studies import config_of


def test_training_losses_are_means_over_windows() -> None:
    metrics = [
        {"batch": batch, "loss/train/clm" if batch <= 300 else "loss/train/mlm": 1 / batch}
        for batch in range(1, 5 * MAX_POINTS + 1)
    ]
    metrics[9]["loss/train/clm"] = math.nan
    metrics[99] |= {"metrics/clm/loss": 5.0, "metrics/mlm/loss": 6.0}
    points = loss_points("a", metrics, 1000)
    training = points[points.kind == "training"].set_index(["objective", "step"])
    assert len(training) == MAX_POINTS and set(points.run) == {"a"}
    window = training.loc[("clm", 1003)]
    expected = mean_interval([1 / 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert (window.loss, window.half_width, window.batches) == pytest.approx((expected.mean, expected.half, 5))
    assert training.batches["clm", 1007.5] == 4  # without NaN
    assert ("mlm", 1303) in training.index and ("clm", 1303) not in training.index
    validation = points[points.kind == "validation"]
    assert validation[["objective", "step", "loss"]].to_numpy().tolist() == [["clm", 1100, 5.0], ["mlm", 1100, 6.0]]
    assert validation.half_width.isna().all()


@pytest.mark.parametrize(("batches", "expected"), [(10, [5, 5]), (11, [5, 6]), (12, [5, 7]), (13, [5, 5, 3]), (2, [2])])
def test_a_window_of_few_batches_at_the_end_is_joined(batches: int, expected: list[int]) -> None:
    points = loss_points("a", [{"batch": batch, "loss/train/mlm": 1.0} for batch in range(1, batches + 1)], 0)
    assert list(points.batches) == expected


def events_of(config: PretrainConfig, base_steps: int = 0) -> list[tuple[str, float]]:
    return list(loss_events("a", config, base_steps)[["kind", "step"]].itertuples(index=False, name=None))


def test_switches_and_decays() -> None:
    config = config_of("610m-clm-100-mlm40-400")
    assert events_of(config, 42000) == [("switch", 42100), ("decay", 42380)]
    tokens = config_of("610m-clm-400", max_duration="102400tok", schedule={"decay": "0.5dur"})
    assert events_of(tokens) == [("decay", 200)]
    epochs = config_of("610m-clm-400", max_duration="2ep", schedule={"decay": "1ep"})
    assert events_of(epochs) == []
    assert events_of(config_of("610m-clm-400", schedule={})) == []


def test_a_figure_of_losses_and_events() -> None:
    metrics = [{"batch": batch, "loss/train/mlm": 3 - batch / 100} for batch in range(1, 101)]
    metrics[99] |= {"metrics/mlm/loss": 2.5}
    events = loss_events("a", config_of("610m-mlm40-400", max_duration="100ba", schedule={"decay": "20ba"}), 0)
    losses = pd.concat([loss_points("a", metrics, 0), events], ignore_index=True)
    training, validation = losses_figure(losses).axes
    assert (training.get_title(), validation.get_title()) == ("MLM, training", "MLM, validation")
    curve, decay = training.get_lines()
    assert list(curve.get_xdata())[:2] == [3, 8] and list(curve.get_ydata())[:2] == pytest.approx([2.97, 2.92])
    assert (decay.get_xdata()[0], decay.get_marker()) == (80, "v")
    assert len(validation.get_lines()) == 1, "a decay is not drawn far from a curve"


@pytest.mark.parametrize("value", [True, False])
def test_a_run_that_has_only_begun(value: bool) -> None:
    metrics = [{"batch": 1, "loss/train/clm": 4.0}] if value else [{"batch": 1}]
    assert list(loss_points("a", metrics, 0).loss) == ([4.0] if value else [])
    assert loss_points("a", [], 0).empty
