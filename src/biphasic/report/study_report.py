"""Assemble the files of a study's report, with the paper's figures of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING

import pandas as pd

from biphasic.config.model_names import Facets, parameters_in_size, short_steps
from biphasic.report.drawing import default_style, draw_curves, plain, png
from biphasic.report.formatting import (
    NOT_AVAILABLE,
    csv_table,
    escape,
    format_interval,
    format_p,
    format_signed,
    markdown_page,
    markdown_table,
)
from biphasic.report.scores import ScoreTable, differences, name_origins, score_table
from biphasic.report.study_folder import Study
from biphasic.report.study_losses import losses_figure
from biphasic.storage import json_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_RATIO = 40
"""The masking ratio of most of the paper's models, in percent: the tie-break between equally frequent ratios."""
SIGNIFICANT = 0.05
"""Differences with a smaller corrected p-value are listed in the report; `differences.csv` has all."""
_FACETS = ["size", "objective", "masking_ratio", "clm_steps", "total_steps", "steps", "continued_from"]
_SCORES = ["group", "trained_on", "task", "test_set", "metric", "lr", "seed", "score", "settled"]


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


@default_style()
def report_files(study: Study) -> dict[str, bytes | None]:
    """Return the files' contents by name; None for a figure without data, whose older file is to be removed.

    Equal records and metrics give equal bytes.
    """
    table, facets = score_table(study.scores), facet_table(study.models)
    scored = sorted(table.means.query("test_set == '' and seeds > 0").index.unique("model"))
    names = [*(figure.name for figure in FIGURES), "losses"]
    files: dict[str, bytes | None] = {f"{name}{suffix}": None for name in names for suffix in (".png", ".csv")}
    lines, reasons = ["# Study", "", *_models(facets, table, scored)], list[str]()
    all_compared = list[pd.DataFrame]()
    for figure in FIGURES:
        points, hidden = arrange(figure, facets[facets.model.isin(scored)])
        if points.empty:
            reasons.append(f"`{figure.name}` needs {figure.needs}")
            continue
        rows, compared = figure_scores(points, table), figure_differences(points, table)
        files[f"{figure.name}.png"] = png(draw_figure(figure, points, rows))
        files[f"{figure.name}.csv"] = csv_table(rows)
        lines += _figure(figure, compared)
        for name, shown in hidden.items():
            place = f"because {escape(shown)} has the same place in it"
            reasons.append(f"`{figure.name}` doesn't show {escape(name)}, {place}")
        all_compared.append(compared.assign(figure=figure.name).drop(columns="test_set"))
    if study.losses.loss.notna().any():
        files["losses.png"] = png(losses_figure(study.losses))
        files["losses.csv"] = csv_table(study.losses)
        lines += [
            *["## Losses of the runs", "", "![losses](losses.png)", ""],
            "Training losses are means over consecutive batches, with a band of their 95% interval. Diamonds: switches of",
            "the objective. Triangles: the learning rate begins to fall.",
            "",
        ]
    else:
        reasons.append("`losses` needs a run's metrics.jsonl beside its config.yaml")
    reasons += map(escape, [*_without_mean(study.scores, table), *study.notes])
    lines += ["## Left out", "", *([f"- {reason}." for reason in reasons] or ["Nothing."])]
    groups, means = [group for group, _ in table.groups], table.means.score
    by_group = {name: means.xs((name, ""), level=("model", "test_set")).reindex(groups).dropna() for name in scored}
    return {
        "report.md": markdown_page(lines),
        "scores.csv": csv_table(study.scores[["model", *_SCORES]].merge(facets[["model", *_FACETS]], "left", "model")),
        "groups.json": json_bytes({name: scores.to_dict() for name, scores in by_group.items()}),
        "differences.csv": csv_table(pd.concat(all_compared)) if all_compared else None,
        **files,
    }


def facet_table(models: Mapping[str, Facets]) -> pd.DataFrame:
    """Return the models' facets as a table, sorted by size, steps, CLM steps and masking ratio.

    Additional columns: `ratio` and the `share` of CLM in percent; `kind` and `budget` as text; `scratch` for final
    models that don't continue another model; `usual` for CLM models and models with the most frequent masking ratio.
    """
    rows = [{"model": name, **asdict(facets)} for name, facets in models.items()]
    table = pd.DataFrame(rows, columns=["model", *(field.name for field in fields(Facets))])
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
    """Return a figure's points, `line x model`, and each model that is hidden behind another one at the same place."""
    placed = figure.place(models)[["line", "x", "model"]]
    placed = placed.sort_values("line", key=lambda lines: pd.factorize(lines)[0], kind="stable", ignore_index=True)
    # Models can have the same place, e.g. with two optimizers. The first is shown.
    shown = placed.groupby(["line", "x"]).model.transform("first")
    hidden = placed.model != shown
    return placed[~hidden].reset_index(drop=True), dict(zip(placed.model[hidden], shown[hidden], strict=True))


def figure_differences(points: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return the differences of the groups' means between models with the same line or x; p is corrected over all."""
    pairs = {
        (first.model, second.model): None
        for first, second in combinations(points.itertuples(), 2)
        if (first.line == second.line or first.x == second.x) and first.model != second.model
    }
    compared = differences(table, list(pairs), table.groups)
    return compared[compared.seeds > 0]


def figure_scores(points: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return a figure's numbers: a row for each column of the table and each model with scores."""
    means = table.means[table.means.seeds > 0].reset_index().assign(seeds_asked=table.seeds)
    columns = pd.DataFrame(table.columns, columns=["group", "test_set"])
    rows = columns.merge(points, how="cross").merge(means, on=["group", "test_set", "model"])
    names = ["group", "task", "test_set", "line", "x", "model", "score", "half_width", "seeds", "seeds_asked"]
    return rows[[*names, "settled", "complete"]]


def draw_figure(figure: StudyFigure, points: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Draw `figure_scores`: means over seeds with 95% intervals, with a panel for each group or test set.

    A point is hollow if seeds are missing or its learning rate may still change.
    """
    curves = scores.sort_values("test_set", key=lambda names: names != "", kind="stable")
    curves = curves if figure.each_task else curves[curves.test_set == ""]
    sizes = list(points.x.unique()) if points.x.dtype == "str" else []
    if sizes:
        curves = curves.assign(x=curves.x.map(sizes.index))
    y, half = 100 * curves.score, 100 * curves.half_width.fillna(0)
    panels = curves.test_set.where(curves.test_set != "", curves.group)
    drawn = draw_curves(curves.assign(panel=panels, y=y, low=y - half, high=y + half), figure.x_label)
    for axes in drawn.axes if sizes else ():
        axes.set_xticks(range(len(sizes)), list(map(plain, sizes)))
        axes.set_xlim(-0.4, len(sizes) - 0.6)
    return drawn


def _models(facets: pd.DataFrame, table: ScoreTable, scored: list[str]) -> list[str]:
    body = [
        [escape(row.model), escape(row.size), row.objective, NOT_AVAILABLE if pd.isna(row.ratio) else f"{row.ratio:g}%",
         f"{row.clm_steps:,}", f"{row.steps:,}", "" if pd.isna(row.continued_from) else escape(row.continued_from), *scores]
        for row, scores in zip(facets.itertuples(), table.text(facets.model, table.groups), strict=True)
    ]  # fmt: skip
    # Models without a run, such as means of checkpoints.
    others = [name for name in scored if name not in set(facets.model)]
    cells = zip(others, table.text(others, table.groups), strict=True)
    body += [[escape(name), *[""] * 6, *scores] for name, scores in cells]
    header = ["model", "size", "objective", "masking ratio", "CLM steps", "steps", "continues"]
    return [
        *["## Models", "", *markdown_table([*header, *(escape(group) for group, _ in table.groups)], body)],
        "Points (100 times the score): mean over seeds ± half of the 95% interval, at the learning rate with the best",
        "validation score, with the number of seeds in brackets. A group's mean is over its tasks. `missing`: a test set of",
        "the group has no score.",
        "",
    ]


def _without_mean(scores: pd.DataFrame, table: ScoreTable) -> list[str]:
    """Return a line for each group that models have scores of and no mean, with the seeds of each test set."""
    rows, models = name_origins(scores), dict[str, list[str]]()
    rows = rows[rows.in_mean.astype(bool)]
    for (model, group), own in rows.groupby(["model", "group"]):
        if not table.means.seeds[model, group, ""]:
            sets = rows.test_set[rows.group == group].unique()
            seeds = [f"{name}: {', '.join(map(str, sorted(own.seed[own.test_set == name]))) or 'none'}" for name in sets]
            models.setdefault(f"no seed has a score on each test set of {group} ({'; '.join(seeds)})", []).append(str(model))
    return [f"{', '.join(names)}: {line}" for line, names in models.items()]


def _figure(figure: StudyFigure, compared: pd.DataFrame) -> list[str]:
    lines = [
        *[f"## {figure.title}", "", f"![{figure.name}]({figure.name}.png)", ""],
        *[f"{figure.place.__doc__} Bars: 95% intervals. Hollow: not all seeds, or a rate that may still change.", ""],
    ]
    if compared.empty:
        return lines
    significant = compared[compared.p_holm < SIGNIFICANT]
    lines += [
        f"{len(compared)} differences between models with the same line or position, paired by seed:",
        f"p < {SIGNIFICANT} after Holm's correction over them for {len(significant)}.",
        "",
    ]
    body = [
        [escape(row.group), escape(row.first), escape(row.second),
         format_interval(row.difference, row.half_width, format_signed), format_p(row.p_holm)]
        for row in significant.itertuples()
    ]  # fmt: skip
    return lines + markdown_table(["", "model", "minus", "difference", "p, Holm"], body)


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
    chosen = chosen.assign(line=chosen.kind + " from " + chosen.continued_from, x=chosen.total_steps - chosen.base_steps)
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
