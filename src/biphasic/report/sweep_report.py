"""Assemble the files of a sweep's report: its tables, CSVs and figures."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from biphasic.config.model_names import facets_of_models
from biphasic.report.drawing import default_style, draw_curves, draw_means, png
from biphasic.report.formatting import (
    MISSING,
    NOT_AVAILABLE,
    csv_table,
    escape,
    format_interval,
    format_p,
    format_points,
    format_rate,
    format_seeds,
    format_signed,
    markdown_page,
    markdown_table,
)
from biphasic.report.scores import ScoreTable, chosen_scores, differences, name_origins, score_table
from biphasic.sweep.records import Grid

MAX_DIFFERENCES = 300
"""The report lists all differences up to this number; `differences.csv` always has all."""
NEAR = 0.01
"""A rate is near the best one if its score is at most this much (one point) lower."""
_CAPTIONS = {
    "learning-rates.png": "Test score against learning rate: mean over seeds, with a band from the lowest to the highest.\n"
    "A hollow point has fewer seeds than the grid.",
    "steps.png": "Test score against pretraining steps: mean and 95% interval over seeds.",
}


@default_style()
def report_files(grid: Grid, trials: pd.DataFrame) -> dict[str, bytes | None]:
    """Return the files' contents by name, from a grid and its `trial_table`.

    None stands for a figure without data, whose older file is to be removed. An equal grid and equal records give equal
    bytes, regardless of the order in which the records were written.
    """
    table = score_table(chosen_scores(trials))
    named = name_origins(trials)
    absent = _without_scores(named)
    steps = pd.Series({model.name: model.steps for model in grid.models}, dtype="Int64").rename("steps")
    pairs = list(combinations(steps.index, 2))
    test_sets = [column for column in table.columns if column[1]]
    compared = pd.concat([differences(table, pairs, columns) for columns in (table.groups, test_sets)])
    figures = {"learning-rates.png": _rates_figure(grid, named), "steps.png": _steps_figure(steps, table)}
    lines = [
        *_overview(grid, trials),
        *_main_table(table, list(steps.index), absent),
        *_differences(table, compared, list(steps.index), absent),
        *_rates(grid, named, table),
        *_failures(trials),
        *(f"![{name}]({name})\n\n{_CAPTIONS[name]}\n" for name, content in figures.items() if content),
    ]
    means = table.means.drop(columns="text").reset_index().join(steps, on="model").assign(seeds_asked=table.seeds)
    return {
        "report.md": markdown_page(lines),
        "results.csv": csv_table(trials[trials.planned].drop(columns=["steps", "planned", "error"])),
        "table.csv": csv_table(means),
        "differences.csv": csv_table(compared),
        **figures,
    }


def _without_scores(trials: pd.DataFrame) -> set[tuple[str, str]]:
    """Return the test sets without test data, and their groups: trials are done, but none has a test score."""
    done = trials[trials.planned & (trials.status == "done")]
    counts = done.groupby(["group", "test_set"]).test.count()
    absent = counts.index[counts == 0]
    return {*absent, *((group, "") for group, _ in absent)}


def _title(group: str, test_set: str) -> str:
    return escape(test_set) or f"{escape(group)}, mean"


def _overview(grid: Grid, trials: pd.DataFrame) -> list[str]:
    values = {
        "models": [model.name for model in grid.models],
        "tasks": [task.name for task in grid.tasks],
        "learning rates": [format_rate(lr) for lr in grid.learning_rates],
        "seeds": [str(seed) for seed in grid.seeds],
    }
    statuses = ["done", "failed", MISSING]
    planned = trials[trials.planned].drop_duplicates("trial")
    counts = pd.crosstab(planned.model, planned.status).reindex(columns=statuses, fill_value=0)
    body = [[name, len(items), escape(", ".join(items))] for name, items in values.items()]
    body.append(["trials", len(planned), ", ".join(f"{counts[status].sum()} {status}" for status in statuses)])
    lines = ["# Sweep", "", "## Grid", "", *markdown_table(["", "", ""], body)]
    if counts.done.sum() < len(planned):
        lines += markdown_table(["model", *statuses], [[escape(name), *counts.loc[name]] for name in values["models"]])
    if missing := counts[MISSING].sum():
        lines += [f"**{missing} trials are missing: numbers that depend on them are not final.**", ""]
    return lines


def _main_table(table: ScoreTable, models: list[str], absent: set[tuple[str, str]]) -> list[str]:
    body = []
    for column in table.columns:
        means = table.means.loc[[(model, *column) for model in models]]
        # An incomplete mean may still change, so it can't be the best.
        points = means.score.map(format_points).where(means.complete)
        best = max(points.dropna(), key=float) if points.count() > 1 else None
        texts = [
            "**{}** ({}".format(*text.rsplit(" (", 1)) if number == best else text
            for text, number in zip(means["text"], points, strict=True)
        ]
        texts = [NOT_AVAILABLE] * len(models) if column in absent else texts
        body.append([_title(*column), escape(means.metric.iloc[0] or ""), *texts])
    return [
        *["## Test scores", ""],
        *markdown_table(["", "metric", *map(escape, models)], body),
        "Points (100 times the score): mean ± half of the 95% interval over seeds, with the number of seeds in brackets.",
        "Bold: the best complete mean. `3 of 5`: the other seeds have no score. `rate open`: missing trials could",
        f"change the chosen learning rate. `{MISSING}`: no score so far. `{NOT_AVAILABLE}`: no test set.",
        "",
    ]


def _differences(
    table: ScoreTable, compared: pd.DataFrame, models: list[str], absent: set[tuple[str, str]]
) -> list[str]:
    if len(models) < 2:
        return []
    lines = [
        *["## Differences between models", ""],
        "Points, paired by seed, with the 95% interval; p of the paired t-test, and p corrected by Holm's method over all",
        "differences of the same kind (families, test sets).",
        "",
    ]
    if len(compared) > MAX_DIFFERENCES:
        compared = compared[compared["first"] == models[0]]
        lines += [f"Only those with {escape(models[0])}; p is corrected over all, which are in `differences.csv`.", ""]
    body = []
    for row in compared.itertuples():
        numbers = [NOT_AVAILABLE if (row.group, row.test_set) in absent else MISSING] * 3
        if row.seeds:
            difference = format_interval(row.difference, row.half_width, format_signed)
            numbers = [difference, format_p(row.p), format_p(row.p_holm)]
        names = [_title(row.group, row.test_set), escape(row.first), escape(row.second)]
        body.append([*names, *numbers, format_seeds(row.seeds, table.seeds, row.settled or not row.seeds)])
    return lines + markdown_table(["", "model", "minus", "difference", "p", "p, Holm", "seeds"], body)


def _rates(grid: Grid, trials: pd.DataFrame, table: ScoreTable) -> list[str]:
    """Return the table of validation scores and chosen rates, and how much test scores vary over seeds and rates."""
    rates, choosing = list(grid.learning_rates), grid.seeds[: grid.rate_seeds]
    deviations = table.scores.groupby(["model", "group", "test_set"]).score.std()
    body = []
    for (group, test_set, model), rows in trials.groupby(["group", "test_set", "model"], sort=False):
        chosen, settled = rows.chosen_lr.iloc[0], rows.settled.iloc[0]
        validation = rows[rows.seed.isin(choosing)].groupby("lr").validation.mean().reindex(rates)
        # Seeds without a record at some rate would favour that rate.
        recorded = rows.groupby("seed").status.transform(lambda statuses: (statuses != MISSING).all())
        by_rate = rows[recorded].pivot(index="seed", columns="lr", values="test")
        ranges = (by_rate.max(axis=1) - by_rate.min(axis=1))[by_rate.count(axis=1) > 1]
        # A rate with a failed trial counts among the rates, but never as near the best one.
        means = by_rate.mean(skipna=False)
        near = f"{(means >= means.max() - NEAR - 1e-12).sum()} of {len(rates)}" if len(by_rate) else NOT_AVAILABLE
        failed = (rows.planned & (rows.status == "failed")).sum()
        body.append([
            *(escape(test_set), escape(model)),
            MISSING if pd.isna(chosen) else format_rate(chosen) + ("" if settled else " (open)"),
            *(format_points(score, MISSING) for score in validation),
            *(format_points(deviations[model, group, test_set]), format_points(ranges.mean()), near),
            *(format_seeds(len(by_rate), table.seeds), f"{failed} of {rows.planned.sum()}"),
        ])  # fmt: skip
    stability = ["sd over seeds", "range over rates", "rates within 1 point", "over seeds", "failed trials"]
    return [
        *["## Learning rates and stability", ""],
        "Points. First the validation score at each rate, by which the rate is chosen: the mean over the seeds with a",
        f"score, of {', '.join(map(str, choosing))}. Then test scores: the standard deviation over seeds at the chosen",
        "rate; the best minus the worst rate with the same seed, averaged over seeds; and the rates within a point of the",
        "best one. The last two are over the seeds with which every rate has a record.",
        "",
        *markdown_table(["", "model", "chosen", *map(format_rate, rates), *stability], body),
    ]


def _failures(trials: pd.DataFrame) -> list[str]:
    failed = trials[trials.planned & (trials.status == "failed")].drop_duplicates("trial")
    body = [
        [escape(row.model), escape(row.trained_on), format_rate(row.lr), row.seed,
         escape(str(row.error).strip().partition("\n")[0]) or "no message"]
        for row in failed.fillna({"error": ""}).itertuples()
    ]  # fmt: skip
    table = markdown_table(["model", "task", "learning rate", "seed", "error"], body)
    return ["## Failures", "", *(table or ["None.", ""])]


def _rates_figure(grid: Grid, trials: pd.DataFrame) -> bytes | None:
    """Draw test score against learning rate: a panel for each test set, a line for each model. None without scores."""
    scored = trials[trials.test.notna()]
    by_rate = (100 * scored.test).groupby([scored.test_set, scored.metric, scored.model, scored.lr], sort=False)
    points = by_rate.agg(y="mean", low="min", high="max", seeds="count").reset_index()
    points = points.assign(panel=points.test_set + ", " + points.metric, line=points.model, x=points.lr)
    points["complete"] = points.seeds == len(grid.seeds)
    if points.empty:
        return None
    figure = draw_curves(points, "learning rate", band=True)
    for axes in figure.axes:
        axes.set_xscale("log")
    return png(figure)


def _steps_figure(steps: pd.Series, table: ScoreTable) -> bytes | None:
    """Draw mean test score against pretraining steps, with a panel for each task family and a line for each run.

    A model whose name doesn't have the format of the paper's models is a run of its own. Returns None if no model with
    known steps has a score for a family.
    """
    runs = {name: facets.run for name, facets in facets_of_models(list(steps.index), {})[0].items()}
    means = table.means.reset_index()
    means = means[(means.test_set == "") & (means.seeds > 0) & means.model.isin(steps.dropna().index)]
    points = means.assign(line=means.model.replace(runs), x=means.model.map(steps).astype(float))
    return png(draw_means(points, "pretraining steps")) if len(points) else None
