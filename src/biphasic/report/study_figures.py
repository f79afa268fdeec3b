"""The paper's figures of scores: the models in each, their lines and positions, and the drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import pandas as pd

from biphasic.config.model_names import Facets, parameters_in_size, short_steps
from biphasic.report.drawing import bars, draw_curves, plain, with_bars
from biphasic.report.scores import ScoreTable, differences

PAPER_RATIO = 40
"""The masking ratio of most of the paper's models, in percent: the tie-break between equally frequent ratios."""
if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StudyFigure:
    """A figure of scores in a study's report."""

    title: str
    x_label: str
    needs: str
    """The models that the figure requires."""
    place: Callable[[pd.DataFrame], pd.DataFrame]
    """Returns the rows of a `facet_table` to show, with their `line` and `x`. Its docstring is the caption."""
    each_task: bool = False
    """Whether the figure also has a panel for each test set."""

    @property
    def name(self) -> str:
        """The name of the figure's files, without suffix."""
        return self.place.__name__.replace("_", "-")


@dataclass(frozen=True)
class ArrangedFigure:
    """A figure whose models have scores."""

    figure: StudyFigure
    points: pd.DataFrame
    """Columns `line x model`, sorted by line and x."""
    hidden: dict[str, str]
    """For each model that isn't shown, the model that is shown at the same place."""
    differences: pd.DataFrame
    """Differences of the groups' means between models with the same line or x; p is corrected over the figure."""


def facet_table(models: Mapping[str, Facets]) -> pd.DataFrame:
    """Return the models' facets as a table, sorted by size, steps, CLM steps and masking ratio.

    Additional columns: `ratio` and the `share` of CLM in percent; `kind` and `budget` as text; `scratch` for final
    models that don't continue another model; `usual` for CLM models and models with the most frequent masking ratio.
    """
    table = pd.DataFrame([{"model": name, **asdict(facets)} for name, facets in models.items()])
    if table.empty:
        return table
    table["final"] = table.steps == table.total_steps
    table["ratio"] = (100 * table.masking_ratio.astype(float)).round(10)
    table["scratch"] = table.final & table.continued_from.isna()
    counts = table.ratio[table.scratch].value_counts()
    usual = min(counts.index, key=lambda ratio: (-counts[ratio], abs(ratio - PAPER_RATIO), ratio), default=None)
    table["usual"] = (table.objective == "clm") | (table.ratio == usual)
    table["share"] = 100 * table.clm_steps / table.total_steps
    percent = table.ratio.map(" {:g}%".format, na_action="ignore").fillna("")
    table["kind"] = table.objective.str.upper().str.replace("-", ", ") + percent
    table["budget"] = table["size"] + ", " + table.total_steps.map(short_steps) + " steps"
    table["parameters"] = table["size"].map(parameters_in_size)
    return table.sort_values(["parameters", "size", "total_steps", "clm_steps", "ratio", "steps"])


def arrange(figure: StudyFigure, models: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a figure's `line x model`, and each model that is hidden behind another one at the same place."""
    if models.empty:
        return models, {}
    placed = figure.place(models)[["line", "x", "model"]]
    placed = placed.sort_values("line", key=lambda lines: pd.factorize(lines)[0], kind="stable", ignore_index=True)
    # Models can have the same place, e.g. with two optimizers. The first is shown.
    shown = placed.groupby(["line", "x"]).model.transform("first")
    hidden = placed.model != shown
    return placed[~hidden].reset_index(drop=True), dict(zip(placed.model[hidden], shown[hidden], strict=True))


def arrange_figures(table: ScoreTable, models: Mapping[str, Facets]) -> tuple[list[ArrangedFigure], dict[str, str]]:
    """Return the figures that can be drawn, and by name what each of the others needs."""
    scored = set(table.scored_models())
    facets = facet_table({name: facets for name, facets in models.items() if name in scored})
    arranged: list[ArrangedFigure] = []
    missing: dict[str, str] = {}
    for figure in FIGURES:
        points, hidden = arrange(figure, facets)
        if points.empty:
            missing[figure.name] = f"needs {figure.needs}"
            continue
        pairs = {
            (first.model, second.model): None
            for first, second in combinations(points.itertuples(), 2)
            if (first.line == second.line or first.x == second.x) and first.model != second.model
        }
        compared = differences(table, list(pairs), table.groups)
        arranged.append(ArrangedFigure(figure, points, hidden, compared[compared.seeds > 0]))
    return arranged, missing


def figure_scores(arranged: ArrangedFigure, table: ScoreTable) -> pd.DataFrame:
    """Return a figure's numbers: a row for each column of the table and each model with scores."""
    means = table.means[table.means.seeds > 0].reset_index().assign(seeds_asked=table.seeds)
    columns = pd.DataFrame(table.columns, columns=["group", "test_set"])
    rows = columns.merge(arranged.points, how="cross").merge(means, on=["group", "test_set", "model"])
    names = ["group", "task", "test_set", "line", "x", "model", "score", "half_width", "seeds", "seeds_asked"]
    return rows[[*names, "settled", "complete"]]


def draw_figure(arranged: ArrangedFigure, table: ScoreTable) -> Figure:
    """Draw means over seeds with 95% intervals, with a panel for each group or test set.

    A point is hollow if seeds are missing or its learning rate may still change.
    """
    rows = figure_scores(arranged, table).sort_values("test_set", key=lambda names: names != "", kind="stable")
    curves = with_bars(rows if arranged.figure.each_task else rows[rows.test_set == ""])
    sizes = list(arranged.points.x.unique()) if arranged.points.x.dtype == "str" else []
    if sizes:
        curves["x"] = curves.x.map(sizes.index)
    figure = draw_curves(curves, arranged.figure.x_label, "test (points)", bars)
    for axes in figure.axes if sizes else ():
        axes.set_xticks(range(len(sizes)), list(map(plain, sizes)))
        axes.set_xlim(-0.4, len(sizes) - 0.6)
    return figure


def objective_by_size(models: pd.DataFrame) -> pd.DataFrame:
    """CLM and MLM models of each size, with the same number of steps and the usual masking ratio."""
    chosen = models[models.scratch & models.usual & models.objective.isin(["clm", "mlm"])]
    chosen = _with_most_steps(chosen[_values(chosen, "budget", "objective") == 2]).sort_values("kind", kind="stable")
    return chosen.assign(line=chosen.kind, x=chosen["size"])


def masking_ratio(models: pd.DataFrame) -> pd.DataFrame:
    """MLM models with several masking ratios, by size, with the number of steps for which there are most ratios."""
    chosen = models[models.scratch & (models.objective == "mlm") & models.ratio.notna()]
    ratios = _values(chosen, "budget", "ratio")
    chosen = _with_most_steps(chosen[(ratios > 1) & (ratios == ratios.groupby(chosen["size"]).transform("max"))])
    return chosen.assign(line=chosen.budget, x=chosen.ratio)


def clm_share(models: pd.DataFrame) -> pd.DataFrame:
    """CLM first, then MLM: models by the share of CLM in all steps. 0% is MLM alone, 100% CLM alone."""
    chosen = models[models.scratch & models.usual & models.objective.isin(["clm", "clm-mlm", "mlm"])]
    has_both = chosen.budget.isin(chosen.budget[chosen.objective == "clm-mlm"])
    chosen = chosen[has_both & (_values(chosen, "budget", "share") > 1)]
    return chosen.assign(line=chosen.budget, x=chosen.share)


def ratio_sensitivity(models: pd.DataFrame) -> pd.DataFrame:
    """Models by masking ratio, trained with MLM alone, or with CLM first in the same number of steps."""
    chosen = models[models.scratch & models.objective.isin(["mlm", "clm-mlm"]) & models.ratio.notna()]
    chosen = chosen[_values(chosen, ["budget", "clm_steps"], "ratio") > 1]
    alone = chosen.clm_steps == 0
    chosen = chosen[chosen.budget.isin(chosen.budget[alone]) & chosen.budget.isin(chosen.budget[~alone])]
    kinds = [f": CLM {short_steps(steps)}, then MLM" if steps else ": MLM alone" for steps in chosen.clm_steps]
    return chosen.assign(line=chosen.budget + pd.Series(kinds, chosen.index, dtype=str), x=chosen.ratio)


def learning_curves(models: pd.DataFrame) -> pd.DataFrame:
    """Checkpoints of runs by pretraining steps."""
    chosen = models[_values(models, "run", "steps") > 1].sort_values("run", kind="stable")
    return chosen.assign(line=chosen.run, x=chosen.steps)


def continued_pretraining(models: pd.DataFrame) -> pd.DataFrame:
    """Decayed models, and models that continue them, by the additional steps."""
    chosen = models[models.final & models.continued_from.notna()]
    chosen = chosen.assign(
        line=chosen.kind + " from " + chosen.continued_from, x=chosen.total_steps - chosen.base_steps
    )
    bases = chosen.drop_duplicates("line").assign(model=lambda rows: rows.continued_from, x=0)
    chosen = pd.concat([bases[bases.model.isin(models.model)], chosen]).sort_values("line", kind="stable")
    return chosen[_values(chosen, "line", "x") > 1]


def _values(models: pd.DataFrame, groups: str | list[str], column: str) -> pd.Series:
    """Return for each model the number of distinct values of a column in its group."""
    return models.groupby(groups)[column].transform("nunique")


def _with_most_steps(models: pd.DataFrame) -> pd.DataFrame:
    """Return the models with the largest number of steps among those of their size."""
    return models[models.total_steps == models.groupby("size").total_steps.transform("max")]


FIGURES = (
    StudyFigure(
        "Objective and size", "size", "a CLM and an MLM model of the same size and number of steps", objective_by_size
    ),
    StudyFigure(
        "Masking ratio, size and task", "masking ratio (%)",
        "MLM models of one size and number of steps with different masking ratios", masking_ratio, each_task=True,
    ),
    StudyFigure(
        "CLM share and budget", "CLM steps (% of all)",
        "a CLM-then-MLM model, and another CLM share of the same size and number of steps", clm_share,
    ),
    StudyFigure(
        "Sensitivity to the masking ratio, with and without CLM", "masking ratio (%)",
        "two masking ratios with CLM first and two without, of the same size and number of steps", ratio_sensitivity,
    ),
    StudyFigure(
        "Learning curves", "pretraining steps",
        "scores of at least two checkpoints of a run, such as 610m-mlm40-42k-5000", learning_curves,
    ),
    StudyFigure(
        "Continued pretraining", "additional steps",
        "a model that continues a decayed one, and that one or another number of steps", continued_pretraining,
    ),
)  # fmt: skip
"""The figures of scores. The figure of losses is drawn by `study_losses`."""
