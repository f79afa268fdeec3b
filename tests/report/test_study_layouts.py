"""Which models of a study stand where in the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from biphasic.report.study_layouts import (
    Layout,
    MissingModels,
    Models,
    clm_share,
    continued_pretraining,
    learning_curves,
    masking_ratio,
    objective_by_size,
    ratio_sensitivity,
)
from biphasic.report.study_models import facets_of_name
from studies import MODELS


def arrange(function: Callable[[Models], Layout], models: Iterable[str]) -> dict[str, dict[float, str]]:
    """The models by line and x."""
    lines: dict[str, dict[float, str]] = {}
    for placement in function({name: facets_of_name(name) for name in models}).placements:
        lines.setdefault(placement.line, {})[placement.x] = placement.model
    return lines


def test_objective_by_size() -> None:
    assert arrange(objective_by_size, MODELS) == {
        "CLM": {0: "210m-clm-400", 1: "610m-clm-400"},
        "MLM 40%": {0: "210m-mlm40-400", 1: "610m-mlm40-400"},
    }
    layout = objective_by_size({name: facets_of_name(name) for name in MODELS})
    assert layout.ticks == {0: "210m", 1: "610m"}


def test_the_usual_ratio_is_that_of_most_models_then_the_papers() -> None:
    names = ["1b-clm-42k", "1b-mlm20-42k", "1b-mlm40-42k"]
    assert list(arrange(objective_by_size, names)) == ["CLM", "MLM 40%"]
    assert list(arrange(objective_by_size, [*names, "1b-mlm20-12k"])) == ["CLM", "MLM 20%"]


def test_masking_ratio() -> None:
    assert arrange(masking_ratio, MODELS) == {
        "210m, 400 steps": {20: "210m-mlm20-400", 40: "210m-mlm40-400"},
        "610m, 400 steps": {20: "610m-mlm20-400", 40: "610m-mlm40-400"},
    }


def test_clm_share() -> None:
    # 210m has no model with both objectives, and 20% is another masking ratio.
    assert arrange(clm_share, MODELS) == {
        "610m, 200 steps": {0: "610m-mlm40-200", 30: "610m-clm-60-mlm40-200", 100: "610m-clm-200"},
        "610m, 400 steps": {
            0: "610m-mlm40-400",
            25: "610m-clm-100-mlm40-400",
            50: "610m-clm-200-mlm40-400",
            100: "610m-clm-400",
        },
    }


def test_ratio_sensitivity() -> None:
    assert arrange(ratio_sensitivity, MODELS) == {
        "610m, 400 steps: MLM alone": {20: "610m-mlm20-400", 40: "610m-mlm40-400"},
        "610m, 400 steps: CLM 100, then MLM": {20: "610m-clm-100-mlm20-400", 40: "610m-clm-100-mlm40-400"},
    }


def test_learning_curves() -> None:
    assert arrange(learning_curves, MODELS) == {
        "610m-clm-400": {100: "610m-clm-400-100", 400: "610m-clm-400"},
        "610m-mlm40-400": {100: "610m-mlm40-400-100", 400: "610m-mlm40-400"},
    }


def test_continued_pretraining() -> None:
    lines = arrange(continued_pretraining, MODELS)
    assert lines == {
        f"MLM 40% from {base}": {
            0: base,
            20: f"610m-{objective}-dec400-mlm40-420",
            100: f"610m-{objective}-dec400-mlm40-500",
        }
        for objective, base in (("mlm40", "610m-mlm40-400"), ("clm", "610m-clm-400"))
    }
    without_base = arrange(continued_pretraining, [name for name in MODELS if "dec" in name])
    assert [list(points) for points in without_base.values()] == [[20, 100], [20, 100]]


@pytest.mark.parametrize(
    ("function", "models", "message"),
    [
        (
            objective_by_size,
            ("1b-clm-42k", "610m-mlm40-42k", "1b-mlm40-12k"),
            "a CLM and an MLM model of the same size",
        ),
        (masking_ratio, ("1b-mlm40-42k", "610m-mlm20-42k", "1b-mlm20-12k"), "with different masking ratios"),
        (clm_share, ("1b-clm-42k", "1b-mlm40-42k", "610m-clm-10k-mlm40-42k"), "another CLM share"),
        (
            ratio_sensitivity,
            ("1b-mlm40-42k", "1b-mlm20-42k", "1b-clm-10k-mlm40-42k"),
            "two masking ratios with CLM first",
        ),
        (learning_curves, ("1b-clm-42k-1000", "1b-mlm40-42k"), "at least two checkpoints of a run"),
        (continued_pretraining, ("1b-mlm40-dec42k-mlm40-54k", "1b-clm-42k"), "a model that continues a decayed one"),
    ],
)
def test_missing_models(function: Callable[[Models], Layout], models: tuple[str, ...], message: str) -> None:
    with pytest.raises(MissingModels, match=message):
        arrange(function, models)


@pytest.mark.parametrize("function", [objective_by_size, masking_ratio, clm_share, ratio_sensitivity])
def test_models_with_equal_facets_are_named(function: Callable[[Models], Layout]) -> None:
    models = {name: facets_of_name(name) for name in MODELS}
    models["610m-muon"] = replace(models["610m-mlm40-400"], run="610m-muon")
    models["1b-mlm40-400"], models["1b-muon"] = (facets_of_name("1b-mlm40-400") for _ in range(2))  # in no figure
    layout = function(models)
    assert layout.hidden == {"610m-muon": "610m-mlm40-400"}
    assert "610m-mlm40-400" in {placement.model for placement in layout.placements}
