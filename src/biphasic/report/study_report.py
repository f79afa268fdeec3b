"""Assemble the files of a study's report."""

from __future__ import annotations

import math

import pandas as pd

from biphasic.report.drawing import default_style, png
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
from biphasic.report.scores import ScoreTable, score_table
from biphasic.report.study_figures import (
    FIGURES,
    ArrangedFigure,
    arrange_figures,
    draw_figure,
    facet_table,
    figure_scores,
)
from biphasic.report.study_folder import Study
from biphasic.report.study_losses import losses_figure
from biphasic.storage import json_bytes

SIGNIFICANT = 0.05
"""Differences with a smaller corrected p-value are listed in the report; `differences.csv` has all."""
_FACETS = ["size", "objective", "masking_ratio", "clm_steps", "total_steps", "steps", "continued_from"]
_SCORES = ["group", "trained_on", "task", "test_set", "metric", "lr", "seed", "score", "settled"]


@default_style()
def report_files(study: Study) -> dict[str, bytes | None]:
    """Return the files' contents by name; None for a figure without data, whose older file is to be removed.

    Equal records and metrics give equal bytes.
    """
    table, facets = score_table(study.scores), facet_table(study.models)
    figures, missing = arrange_figures(table, study.models)
    names = [*(figure.name for figure in FIGURES), "losses"]
    files: dict[str, bytes | None] = {f"{name}{suffix}": None for name in names for suffix in (".png", ".csv")}
    lines = ["# Study", "", *_models(facets, table)]
    for drawn in figures:
        files[f"{drawn.figure.name}.png"] = png(draw_figure(drawn, table))
        files[f"{drawn.figure.name}.csv"] = csv_table(figure_scores(drawn, table))
        lines += _figure(drawn, table)
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
        missing["losses"] = "needs a run's metrics.jsonl beside its config.yaml"
    compared = [drawn.differences.assign(figure=drawn.figure.name).drop(columns="test_set") for drawn in figures]
    groups: dict[str, dict[str, float]] = {name: {} for name in sorted(table.scored_models())}
    for model, group in ((model, group) for model in groups for group, _ in table.groups):
        if not math.isnan(mean := table.means.score.get((model, group, ""), math.nan)):
            groups[model][group] = mean
    return {
        "report.md": markdown_page([*lines, *_evaluations(study.evaluations), *_left_out(study, figures, missing)]),
        "scores.csv": csv_table(study.scores[["model", *_SCORES]].merge(facets[["model", *_FACETS]], "left", "model")),
        "groups.json": json_bytes(groups),
        "differences.csv": csv_table(pd.concat(compared)) if compared else None,
        "evaluations.csv": csv_table(study.evaluations) if len(study.evaluations) else None,
        **files,
    }


def _models(facets: pd.DataFrame, table: ScoreTable) -> list[str]:
    body = [
        [escape(row.model), escape(row.size), row.objective, NOT_AVAILABLE if pd.isna(row.ratio) else f"{row.ratio:g}%",
         f"{row.clm_steps:,}", f"{row.steps:,}", "" if pd.isna(row.continued_from) else escape(row.continued_from), *scores]
        for row, scores in zip(facets.itertuples(), table.text(facets.model, table.groups), strict=True)
    ]  # fmt: skip
    header = ["model", "size", "objective", "masking ratio", "CLM steps", "steps", "continues"]
    return [
        *["## Models", "", *markdown_table([*header, *(escape(group) for group, _ in table.groups)], body)],
        "Points (100 times the score): mean over seeds ± half of the 95% interval, at the learning rate with the best",
        "validation score, with the number of seeds in brackets. A group's mean is over its tasks. `missing`: a test set of",
        "the group has no score.",
        "",
    ]


def _figure(drawn: ArrangedFigure, table: ScoreTable) -> list[str]:
    figure, points, compared = drawn.figure, drawn.points, drawn.differences
    cells = table.text(points.model, table.groups)
    body = [
        [escape(point.line), point.x if isinstance(point.x, str) else f"{point.x:,.10g}", escape(point.model), *scores]
        for point, scores in zip(points.itertuples(), cells, strict=True)
    ]
    lines = [
        *[f"## {figure.title}", "", f"![{figure.name}]({figure.name}.png)", ""],
        *[f"{figure.place.__doc__} Bars: 95% intervals. Hollow: not all seeds, or a rate that may still change.", ""],
        *markdown_table(["", figure.x_label, "model", *(escape(group) for group, _ in table.groups)], body),
    ]
    if compared.empty:
        return lines
    significant = compared[compared.p_holm < SIGNIFICANT]
    count = f"{len(compared)} differences between models with the same line or position"
    lines += [
        f"{count}, paired by seed: p < {SIGNIFICANT} after Holm's correction over them for {len(significant)}.",
        "",
    ]
    body = [
        [escape(row.group), escape(row.first), escape(row.second),
         format_interval(row.difference, row.half_width, format_signed), format_p(row.p_holm)]
        for row in significant.itertuples()
    ]  # fmt: skip
    return lines + markdown_table(["", "model", "minus", "difference", "p, Holm"], body)


def _evaluations(evaluations: pd.DataFrame) -> list[str]:
    body = [
        [*map(escape, (row.model, row.system, row.task, row.split)), row.documents, row.metric, f"{row.value:.4f}",
         "" if pd.isna(row.low) else f"{row.low:.4f} to {row.high:.4f}"]
        for row in evaluations.itertuples()
    ]  # fmt: skip
    header = ["model", "system", "task", "split", "documents", "metric", "score", "95% interval"]
    return ["## Evaluations", "", *markdown_table(header, body)] if body else []


def _left_out(study: Study, figures: list[ArrangedFigure], missing: dict[str, str]) -> list[str]:
    reasons = [f"- `{name}` {reason}." for name, reason in missing.items()]
    reasons += [
        f"- `{drawn.figure.name}` doesn't show {escape(name)}, because {escape(shown)} has the same place in it."
        for drawn in figures
        for name, shown in drawn.hidden.items()
    ]
    reasons += [f"- {escape(reason)}." for reason in [*study.unplaced.values(), *study.notes]]
    return ["## Left out", "", *(reasons or ["Nothing."])]
