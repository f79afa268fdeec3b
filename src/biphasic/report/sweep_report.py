"""Assemble the files of a sweep's report: its tables, CSVs and figure."""

from collections.abc import Sequence
from itertools import combinations

import pandas as pd

from biphasic.report.drawing import default_style, draw_curves, png
from biphasic.report.formatting import (
    MISSING,
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
MAX_SIDE_BY_SIDE = 12
"""Test scores of more models have a row for each model, not a column: nobody reads a table of 200 columns."""


@default_style()
def report_files(grid: Grid, trials: pd.DataFrame, notes: Sequence[str] = ()) -> dict[str, bytes | None]:
    """Return the files' contents by name, from a grid and its `trial_table`. `notes` are lines for the overview.

    None stands for a figure without data, whose older file is to be removed. An equal grid and equal records give equal
    bytes, regardless of the order in which the records were written.
    """
    table, named = score_table(chosen_scores(trials)), name_origins(trials)
    pairs = list(combinations(grid.models, 2))
    test_sets = [column for column in table.columns if column[1]]
    compared = pd.concat([differences(table, pairs, columns) for columns in (table.groups, test_sets)])
    figure = _rates_figure(grid, named)
    lines = [
        *_overview(grid, trials),
        *(f"{escape(note)}.\n" for note in notes),
        *_main_table(table, grid.models),
        *_differences(table, compared, grid.models),
        *_rates(grid, named),
        *_failures(trials),
    ]
    if figure is not None:
        lines += [
            "![learning-rates.png](learning-rates.png)\n",
            "Test score against learning rate: mean over seeds, with a band from the lowest to the highest.",
            "A hollow point has fewer seeds than the grid.",
        ]
    return {
        "report.md": markdown_page(lines),
        "results.csv": csv_table(trials[trials.planned].drop(columns=["planned", "error"])),
        "table.csv": csv_table(table.means.drop(columns="text").reset_index().assign(seeds_asked=table.seeds)),
        "differences.csv": csv_table(compared),
        "learning-rates.png": figure,
    }


def _title(group: str, test_set: str) -> str:
    return escape(test_set) or f"{escape(group)}, mean"


def _overview(grid: Grid, trials: pd.DataFrame) -> list[str]:
    values = {
        "models": list(grid.models),
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
        lines += markdown_table(["model", *statuses], [[escape(name), *counts.loc[name]] for name in grid.models])
    if missing := counts[MISSING].sum():
        lines += [f"**{missing} trials are missing: numbers that depend on them are not final.**", ""]
    return lines


def _main_table(table: ScoreTable, models: tuple[str, ...]) -> list[str]:
    body = [["", "metric", *map(escape, models)]]
    for column in table.columns:
        means = table.means.loc[[(model, *column) for model in models]]
        # An incomplete mean may still change, so it can't be the best.
        points = means.score.map(format_points).where(means.complete)
        best = max(points.dropna(), key=float) if points.count() > 1 else None
        texts = [
            "**{}** ({}".format(*text.rsplit(" (", 1)) if number == best else text
            for text, number in zip(means["text"], points, strict=True)
        ]
        body.append([_title(*column), escape(means.metric.iloc[0] or ""), *texts])
    header, *rows = zip(*body, strict=True) if len(models) > MAX_SIDE_BY_SIDE else body
    return [
        *["## Test scores", ""],
        *markdown_table(header, rows),
        "Points (100 times the score): mean ± half of the 95% interval over seeds, with the number of seeds in brackets.",
        "Bold: the best complete mean. `3 of 5`: the other seeds have no score. `rate open`: missing trials could",
        f"change the chosen learning rate. `{MISSING}`: no score.",
        "",
    ]


def _differences(table: ScoreTable, compared: pd.DataFrame, models: tuple[str, ...]) -> list[str]:
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
        numbers = [MISSING] * 3
        if row.seeds:
            difference = format_interval(row.difference, row.half_width, format_signed)
            numbers = [difference, format_p(row.p), format_p(row.p_holm)]
        names = [_title(row.group, row.test_set), escape(row.first), escape(row.second)]
        body.append([*names, *numbers, format_seeds(row.seeds, table.seeds, row.settled or not row.seeds)])
    return lines + markdown_table(["", "model", "minus", "difference", "p", "p, Holm", "seeds"], body)


def _rates(grid: Grid, trials: pd.DataFrame) -> list[str]:
    """Return the table of validation scores and chosen rates."""
    rates, choosing, cell = list(grid.learning_rates), grid.seeds[: grid.rate_seeds], ["group", "test_set", "model"]
    means = trials[trials.seed.isin(choosing)].groupby([*cell, "lr"]).validation.mean().unstack("lr")
    rows = trials.drop_duplicates(cell)
    validation = means.reindex(index=pd.MultiIndex.from_frame(rows[cell]), columns=rates).to_numpy()
    body = []
    for row, scores in zip(rows.itertuples(), validation, strict=True):
        rate = MISSING if pd.isna(row.chosen_lr) else format_rate(row.chosen_lr) + ("" if row.settled else " (open)")
        points = (format_points(score, MISSING) for score in scores)
        body.append([escape(row.test_set), escape(row.model), rate, *points])
    return [
        *["## Learning rates", ""],
        "Points: the validation score at each rate, by which the rate is chosen. It is the mean over the seeds with a",
        f"score, of {', '.join(map(str, choosing))}.",
        "",
        *markdown_table(["", "model", "chosen", *map(format_rate, rates)], body),
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
