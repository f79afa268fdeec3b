"""Which models of a study stand where in the paper's figures."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from matplotlib.collections import LineCollection, PathCollection

from biphasic.report.scores import score_table
from biphasic.report.study_report import FIGURES, arrange, draw_figure, facet_table, figure_scores
from helpers.studies import MODELS, facets_of_name, score_rows

BY_NAME = {figure.name: figure for figure in FIGURES}


def placed(figure: str, models: Iterable[str]) -> dict[str, dict[float | str, str]]:
    """The models by line and x."""
    points, _ = arrange(BY_NAME[figure], facet_table({name: facets_of_name(name) for name in models}))
    lines: dict[str, dict[float | str, str]] = {}
    for point in points.itertuples():
        lines.setdefault(point.line, {})[point.x] = point.model
    return lines


def test_objective_by_size() -> None:
    assert placed("objective-by-size", MODELS) == {
        "CLM": {"210m": "210m-clm-400", "610m": "610m-clm-400"},
        "MLM 40%": {"210m": "210m-mlm40-400", "610m": "610m-mlm40-400"},
    }


def test_the_usual_ratio_is_that_of_most_models_then_the_papers() -> None:
    names = ["1b-clm-42k", "1b-mlm20-42k", "1b-mlm40-42k"]
    assert list(placed("objective-by-size", names)) == ["CLM", "MLM 40%"]
    assert list(placed("objective-by-size", [*names, "1b-mlm20-12k"])) == ["CLM", "MLM 20%"]


def test_masking_ratio() -> None:
    assert placed("masking-ratio", MODELS) == {
        "210m, 400 steps": {20: "210m-mlm20-400", 40: "210m-mlm40-400"},
        "610m, 400 steps": {20: "610m-mlm20-400", 40: "610m-mlm40-400"},
    }


def test_clm_share() -> None:
    # 210m has no model with both objectives, and 20% is another masking ratio.
    assert placed("clm-share", MODELS) == {
        "610m, 200 steps": {0: "610m-mlm40-200", 30: "610m-clm-60-mlm40-200", 100: "610m-clm-200"},
        "610m, 400 steps": {
            0: "610m-mlm40-400",
            25: "610m-clm-100-mlm40-400",
            50: "610m-clm-200-mlm40-400",
            100: "610m-clm-400",
        },
    }


def test_ratio_sensitivity() -> None:
    assert placed("ratio-sensitivity", MODELS) == {
        "610m, 400 steps: MLM alone": {20: "610m-mlm20-400", 40: "610m-mlm40-400"},
        "610m, 400 steps: CLM 100, then MLM": {20: "610m-clm-100-mlm20-400", 40: "610m-clm-100-mlm40-400"},
    }


def test_learning_curves() -> None:
    assert placed("learning-curves", MODELS) == {
        "610m-clm-400": {100: "610m-clm-400-100", 400: "610m-clm-400"},
        "610m-mlm40-400": {100: "610m-mlm40-400-100", 400: "610m-mlm40-400"},
    }


def test_continued_pretraining() -> None:
    lines = placed("continued-pretraining", MODELS)
    assert lines == {
        f"MLM 40% from {base}": {
            0: base,
            20: f"610m-{objective}-dec400-mlm40-420",
            100: f"610m-{objective}-dec400-mlm40-500",
        }
        for objective, base in (("mlm40", "610m-mlm40-400"), ("clm", "610m-clm-400"))
    }
    without_base = placed("continued-pretraining", [name for name in MODELS if "dec" in name])
    assert [list(points) for points in without_base.values()] == [[20, 100], [20, 100]]


@pytest.mark.parametrize(
    ("figure", "models"),
    [
        ("objective-by-size", ("1b-clm-42k", "610m-mlm40-42k", "1b-mlm40-12k")),
        ("masking-ratio", ("1b-mlm40-42k", "610m-mlm20-42k", "1b-mlm20-12k")),
        ("clm-share", ("1b-clm-42k", "1b-mlm40-42k", "610m-clm-10k-mlm40-42k")),
        ("ratio-sensitivity", ("1b-mlm40-42k", "1b-mlm20-42k", "1b-clm-10k-mlm40-42k")),
        ("learning-curves", ("1b-clm-42k-1000", "1b-mlm40-42k")),
        ("continued-pretraining", ("1b-mlm40-dec42k-mlm40-54k", "1b-clm-42k")),
    ],
)
def test_models_that_no_figure_can_compare(figure: str, models: tuple[str, ...]) -> None:
    assert placed(figure, models) == {}


@pytest.mark.parametrize("figure", ["objective-by-size", "masking-ratio", "clm-share", "ratio-sensitivity"])
def test_models_with_equal_facets_are_named(figure: str) -> None:
    models = {name: facets_of_name(name) for name in MODELS}
    models["610m-muon"] = replace(models["610m-mlm40-400"], run="610m-muon")
    models["1b-mlm40-400"], models["1b-muon"] = (facets_of_name("1b-mlm40-400") for _ in range(2))  # in no figure
    points, hidden = arrange(BY_NAME[figure], facet_table(models))
    assert hidden == {"610m-muon": "610m-mlm40-400"}
    assert "610m-mlm40-400" in set(points.model)


def test_the_drawn_points_are_the_means_in_points() -> None:
    """A model without all seeds has a hollow point; sizes are in order; bars are the intervals."""
    models = ("210m-clm-400", "1b-clm-400", "210m-mlm40-400", "1b-mlm40-400")
    scores = {
        (name, "SC", "sst2", "sst2", seed): 0.5 + 0.1 * number + 0.01 * seed
        for number, name in enumerate(models)
        for seed in range(3)
        if (name, seed) != ("1b-mlm40-400", 2)
    }
    table = score_table(score_rows(scores))
    facets = facet_table({name: facets_of_name(name) for name in models})
    [(figure, points)] = [(figure, points) for figure in FIGURES if len(points := arrange(figure, facets)[0])]
    [axes] = draw_figure(figure, points, figure_scores(points, table)).axes
    lines = {line.get_label(): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    assert list(lines["CLM"].get_xdata()) == [0, 1]
    assert list(lines["CLM"].get_ydata()) == pytest.approx([51, 61])
    assert list(lines["MLM 40%"].get_ydata()) == pytest.approx([71, 80.5])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["210m", "1b"]
    markers = [collection for collection in axes.collections if isinstance(collection, PathCollection)]
    white = [[tuple(face[:3]) == (1, 1, 1) for face in collection.get_facecolors()] for collection in markers]
    assert white == [[False, False], [False, True]]
    bars = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    half = table.means.half_width["210m-clm-400", "SC", ""]
    assert bars[0][0][:, 1].tolist() == pytest.approx([51 - 100 * half, 51 + 100 * half])
